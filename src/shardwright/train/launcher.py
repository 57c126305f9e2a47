"""torch's launcher as ``python -m shardwright.train.launcher N WORDS…``: its exit status is that of the ranks.

``python -m torch.distributed.run`` exits with 1 whatever they exit with.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Sequence

from shardwright.errors import BAD_INPUT, DOES_NOT_FIT


def main(ranks: int, words: Sequence[str]) -> int:
    """Runs ``shardwright`` with these words on ``ranks`` processes of this machine.

    Returns 2 or 3 where a rank ended so, 1 where one ended in another way than well.
    """
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.run import parse_args, run

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)  # the ranks have said what was wrong
    try:
        run(parse_args(["--standalone", "--nproc-per-node", str(ranks), "-m", "shardwright", *words]))
    except ChildFailedError as error:
        codes = {rank: failure.exitcode for rank, failure in error.failures.items()}
        for status in (BAD_INPUT, DOES_NOT_FIT):
            if status in codes.values():
                return status
        rank, code = min(codes.items())
        ended = f"exit status {code}" if code >= 0 else f"signal {-code}"
        print(f"error: rank {rank} ended with {ended}", file=sys.stderr, flush=True)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(int(sys.argv[1]), sys.argv[2:]))
