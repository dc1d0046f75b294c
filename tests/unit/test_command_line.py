"""The command line as a whole: version, help with examples that parse, completion."""

import argparse
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import triton_ep
from tests.patience import LIMIT_S
from triton_ep.cli import main, make_parser
from triton_ep.errors import ConfigError

ROOT = Path(__file__).resolve().parents[2]


def _parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    """A parser and the parsers of its sub-commands, recursively."""
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from _parsers(command)


PARSERS = list(_parsers(make_parser()))


def test_version(capsys: pytest.CaptureFixture[str]) -> None:
    """--version works without a sub-command."""
    with pytest.raises(SystemExit) as ended:
        main(["--version"])
    assert ended.value.code == 0
    assert capsys.readouterr().out == f"triton-ep {triton_ep.__version__}\n"


@pytest.mark.parametrize("parser", PARSERS, ids=lambda parser: parser.prog)
def test_help_ends_with_examples_that_parse(parser: argparse.ArgumentParser) -> None:
    """Each --help ends with example commands, one a line, that the parser accepts."""
    text = parser.format_help()
    examples = text.split("\nexamples:\n")[1].splitlines()
    assert examples
    for line in examples:
        words = shlex.split(line.split(" > ")[0].removeprefix("  ").removeprefix('eval "$(').removesuffix(')"'))
        start = words.index("triton_ep.cli") if "triton_ep.cli" in words else words.index("triton-ep")
        if "--help" not in words:
            make_parser().parse_args(words[start + 1 :])
        own = parser.prog.split()[1:]
        assert words[start + 1 :][: len(own)] == own, "an example of another command"
    assert "triton-ep" in text.splitlines()[0]


def test_options_of_bench_are_grouped(capsys: pytest.CaptureFixture[str]) -> None:
    """The usage has one line; options have headings: shape, exchange, measurement, ranks, output."""
    with pytest.raises(SystemExit):
        main(["bench", "dispatch", "--help"])
    text = capsys.readouterr().out
    assert text.splitlines()[:2] == ["usage: triton-ep bench dispatch [options]", ""]
    assert re.findall(r"^(\w+):$", text, re.MULTILINE) == [
        *("options", "shape", "exchange", "measurement", "ranks", "output", "examples"),
    ]


def test_completion_says_what_it_needs(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Without argcomplete the message names, in one line, the extra that installs it."""
    monkeypatch.setitem(sys.modules, "argcomplete", None)
    monkeypatch.setattr("importlib.util.find_spec", lambda name: None)
    assert main(["completion", "bash"]) == 1
    assert f"{ConfigError.__name__}: completion needs" in (told := capsys.readouterr().err)
    assert "triton-ep[completion]" in told


def test_a_shell_completes_commands_and_options(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Tab in bash completes sub-commands, options and choices, without running a command."""
    pytest.importorskip("argcomplete")
    assert main(["completion", "bash"]) == 0
    script = capsys.readouterr().out
    assert "complete" in script and "triton-ep" in script
    program = tmp_path / "triton-ep"
    code = f"import sys; sys.path.insert(0, {str(ROOT)!r}); from triton_ep.cli import main; sys.exit(main())"
    program.write_text(f"#!{sys.executable}\n{code}\n")
    program.chmod(0o755)
    (tmp_path / "script").write_text(script)
    for typed, expected in (
        ("triton-ep do", {"doctor"}),
        ("triton-ep memory --mo", {"--model"}),
        ("triton-ep bench dispatch --model mix", {"mixtral"}),
    ):
        words = typed.split(" ")
        ask = f"""
            PATH={tmp_path}:$PATH; source {tmp_path}/script
            COMP_LINE='{typed}'; COMP_POINT={len(typed)}; COMP_TYPE=9; COMP_WORDS=({typed}); COMP_CWORD={len(words) - 1}
            _python_argcomplete triton-ep; printf '%s\\n' "${{COMPREPLY[@]}}"
        """
        done = subprocess.run(["bash", "-c", ask], capture_output=True, text=True, timeout=LIMIT_S)
        assert {word.strip() for word in done.stdout.split()} == expected, (typed, done.stderr)
