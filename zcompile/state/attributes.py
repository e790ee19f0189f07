"""Names of attributes that zcompile puts on a user's modules."""

LEAF = "_zcompile_leaf_"  # + parameter name: the plain local shard that the module's property gathers
SHARDED = "_zcompile_sharded_"  # + parameter name: its ShardedParameter
STATE = "_zcompile_state"  # the ShardedModel
AROUND = "_zcompile_around"  # of a module's class: the function that wraps its forward and registered methods, or None
RECIPE = "_zcompile_recipe"  # of a module's class: the arguments from which `class_swap._sharded_class` made it
UNIT = "_zcompile_unit"  # of a unit's module: its Unit; of an unsharded parameter: a weak reference to its Unit
UNITS_BELOW = "_zcompile_units_below"  # of a module that calls units: the list of these units
CASTS = "_zcompile_casts"  # of the class of a module that casts its inputs or results: see sharding/precision.py
BLOCK = "_zcompile_block"  # of a module that is a block: its Unit
IN_UNIT = "_zcompile_in_unit"  # of a module: the Unit that gathers its parameters; without any, the Unit it is in
OPENED = "_zcompile_opened"  # of a module called outside of other forwards: the blocks that such a call gathers
IS_OPEN = "_zcompile_is_open"  # of a module whose `_parameters` has unsharded parameters, which its unit gathered
TABLE = "_zcompile_table"  # of a module with sharded parameters: its `_parameters`, which its class hides from Dynamo
PLANS = "_zcompile_plans"  # set on a backend of torch.compile whose graphs gather and free parameters themselves

MODEL = "_zcompile_model"
"""The attribute of a leaf that refers to the `ShardedModel` that it belongs to."""

PARAMETER = "_zcompile_parameter"
"""The attribute of a leaf that refers to its `ShardedParameter`."""
