import sys

from tests.gpu.check.run import main

if __name__ == "__main__":
    sys.exit(main())
