"""Where a full graph's inputs are looked for, in words, for errors."""

PLACES_OF_INPUTS = (
    "the arguments, and the tensors of modules among arguments, in the closure, in default values of parameters, in "
    "globals that the function names, or in attributes of the object that it is a method of"
)
