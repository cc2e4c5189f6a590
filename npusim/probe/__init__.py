"""What the installed OpenVINO's own NPUW path makes of a kind of attention layer, found by trying it."""

from npusim.probe.layer_kind import LayerKind, layer_kind
from npusim.probe.probe import Behaviour, Outcome, probe_kind, probe_layers

__all__ = ["Behaviour", "LayerKind", "Outcome", "layer_kind", "probe_kind", "probe_layers"]
