"""Plain-torch oracles, one per op under the same file name; they import nothing else of triton_ep.

An oracle takes the inputs of all ranks at once and computes the result of one rank, bit for bit where data are
copied. Nothing here communicates. W ranks, E experts over all ranks, e = E / W experts per rank (rank r owns
experts r*e .. r*e + e - 1), T tokens of a rank, K top-k, H hidden, R rows received by a rank.
"""
