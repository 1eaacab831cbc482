import sys

from distill_rl.gpu_check.run import main

if __name__ == "__main__":
    sys.exit(main())
