"""Programs that tests start: all output of several processes arrives, also with programs started side by side."""

from concurrent.futures import ThreadPoolExecutor

from tests.programs import run_program

WRITERS = """
import os
starts = [os.pipe() for rank in range(2)]
for rank, (start, _) in enumerate(starts):
    if os.fork() == 0:
        os.read(start, 1)
        for line in range(20000):
            os.write(1, b"%d\\n" % rank)
        os._exit(0)
for _, start in starts:
    os.write(start, b"!")
os.wait(), os.wait()
"""


def test_ranks_of_a_program_do_not_write_over_each_other() -> None:
    """Two processes share the program's standard output, as ranks under a launcher do."""
    done = run_program(["-c", WRITERS])
    assert done.returncode == 0, done.stderr
    lines = done.stdout.splitlines()
    assert (lines.count("0"), lines.count("1"), len(lines)) == (20000, 20000, 40000)


def test_programs_of_several_threads_keep_their_own_ends() -> None:
    """Each thread gets the output and the exit code of its own program, whichever program ends first."""

    def end_of(number: int) -> tuple[str, int]:
        code = f"import sys, time; time.sleep({number % 4} / 20); print({number}); sys.exit({number})"
        done = run_program(["-c", code])
        return done.stdout, done.returncode

    with ThreadPoolExecutor(8) as threads:
        assert list(threads.map(end_of, range(24))) == [(f"{number}\n", number) for number in range(24)]
