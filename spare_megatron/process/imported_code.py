"""Preloaded last in the fork server: computes the digest of the imported code, which all its children inherit. Exempts
the imported objects from garbage collection: in a child, it would examine them for 0.2 s and copy their shared pages.
"""

import gc

from spare_megatron.config.own_code import code_digest

code_digest()
gc.freeze()
gc.enable()
