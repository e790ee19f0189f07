"""Names of attributes that zcompile puts on a user's modules."""

LEAF = "_zcompile_leaf_"  # + parameter name, of a module: the leaf, which the module's property gathers
SHARDED = "_zcompile_sharded_"  # + parameter name, of a module: its ShardedParameter; of DTensor and leaf: a weakref
STATE = "_zcompile_state"  # of a module: the ShardedModel of its parameters
AROUND = "_zcompile_around"  # of a module's class: the function that wraps its forward and registered methods, or None
RECIPE = "_zcompile_recipe"  # of a module's class: the arguments of the `class_swap._sharded_class` call that made it
UNIT = "_zcompile_unit"  # of a unit's module: its Unit; of an unsharded parameter: a weak reference to its Unit
UNITS_BELOW = "_zcompile_units_below"  # of a module that calls units: the list of their Units
CASTS = "_zcompile_casts"  # of the class of a module that casts its inputs or results: see sharding/precision.py
BLOCK = "_zcompile_block"  # of a module that is a block: its Unit
IN_UNIT = "_zcompile_in_unit"  # of a module: the Unit (also of a block) that gathers its parameters, or contains it
OPENED = "_zcompile_opened"  # of a module that was called outside of other forwards: the result of `blocks._opened_by`
IS_OPEN = "_zcompile_is_open"  # of a module: whether its `_parameters` holds unsharded parameters
TABLE = "_zcompile_table"  # of a module with sharded parameters: its `_parameters`, which its class hides from Dynamo
PLANS = "_zcompile_plans"  # set on a backend of torch.compile whose graphs gather and free parameters themselves
MODEL = "_zcompile_model"  # of a leaf: its ShardedModel
PARAMETER = "_zcompile_parameter"  # of a leaf: its ShardedParameter
