"""Everything that imports torch and the fine-tuning stack."""

import logging

# On import bitsandbytes reports an optional CPU kernel that it did not find and this project does not use.
logging.getLogger("bitsandbytes").setLevel(logging.ERROR)
