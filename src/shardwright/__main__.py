"""``python -m shardwright``: the command line."""

from shardwright.cli.common import main

if __name__ == "__main__":
    main()
