"""The one error of the transformations."""


class DecompositionError(ValueError):
    """A model or node that a transformation cannot lower exactly.

    The message names the node, the value found, the rule, and what to do. The model is unchanged.
    """
