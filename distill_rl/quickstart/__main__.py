import sys

from distill_rl.quickstart.run import main

if __name__ == "__main__":
    sys.exit(main())
