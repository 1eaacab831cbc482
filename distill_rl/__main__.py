import sys

from distill_rl.cli import main

if __name__ == "__main__":
    sys.exit(main())
