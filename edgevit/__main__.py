import sys

from edgevit.cli import main

sys.exit(main())
