"""Where to put experts: the paper's greedy, its balance adjustment, and placements to compare with.

Arrays in, arrays out; nothing here needs torch.
"""

from cap_hf.placement.placer import Placer
from cap_hf.placement.spectrum import PlacementSpectrum

__all__ = ["Placer", "PlacementSpectrum"]
