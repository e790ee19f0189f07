"""Names of attributes that zcompile puts on a user's modules."""

LEAF = "_zcompile_leaf_"  # + parameter name: the plain local shard that the module's property gathers
SHARDED = "_zcompile_sharded_"  # + parameter name: its ShardedParameter
STATE = "_zcompile_state"  # the ShardedModel
UNIT = "_zcompile_unit"  # of a module that is one: its Unit
OWN_FORWARD = "_zcompile_own_forward"  # of a unit whose instance had a forward of its own
UNSHARDED = "_zcompile_unsharded_"  # + parameter name: the unsharded parameter, while a forward of its unit runs

MODEL = "_zcompile_model"
"""The attribute of a leaf that refers to the `ShardedModel` that it belongs to."""

PARAMETER = "_zcompile_parameter"
"""The attribute of a leaf that refers to its `ShardedParameter`."""
