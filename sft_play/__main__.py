"""`python -m sft_play COMMAND`: what every Make target calls."""

import sys

from sft_play.cli.app import main

sys.exit(main())
