"""What was trained, put to use: predict with a client's model, and export it as one file.

import promptfed
model = promptfed.load("runs/pfedpt-cifar10-seed0", client=3)  # or an exported file, which needs no run
print(model.predict("photos/").labels)
"""

from .images import Images
from .loading import export, load
from .predictor import Predictions, Predictor

__all__ = ["Images", "Predictions", "Predictor", "export", "load"]
