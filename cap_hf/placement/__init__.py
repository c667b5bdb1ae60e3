from cap_hf.placement.placer import Placer
from cap_hf.placement.spectrum import PlacementSpectrum
