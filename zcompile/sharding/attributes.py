"""Names of attributes that zcompile puts on a user's modules."""

LEAF = "_zcompile_leaf_"  # + parameter name: the plain local shard that the module's property gathers
SHARDED = "_zcompile_sharded_"  # + parameter name: its ShardedParameter
STATE = "_zcompile_state"  # the ShardedModel

MODEL = "_zcompile_model"
"""The attribute of a leaf that refers to the `ShardedModel` that it belongs to."""

PARAMETER = "_zcompile_parameter"
"""The attribute of a leaf that refers to its `ShardedParameter`."""
