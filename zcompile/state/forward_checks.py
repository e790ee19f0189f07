"""Checks of a sharded model when a forward begins."""

from dataclasses import dataclass, field

from zcompile.state.ignored_parameters import UnreducedParameters
from zcompile.units.find import ExpertsImplementation


@dataclass
class ForwardChecks:
    """
    Attributes:
        unreduced: parameters that train without being reduced; None on one rank, where no gradient is reduced.
        experts: the modules of Hugging Face that could compute their experts in another way.
        eager_without_grad: a plan of transformers has exchanged the forward of linear layers, for kernels that know no
            DTensors. Without gradients, the new one reads local tensors of `module._parameters`, which has unsharded
            parameters in eager code alone.
    """

    unreduced: UnreducedParameters | None = None
    experts: list[ExpertsImplementation] = field(default_factory=list)
    eager_without_grad: bool = False

    def check(self) -> None:
        """Warn of parameters that no rank reduces.

        Raises:
            RuntimeError: experts are computed in another way than when the model was sharded.
        """
        if self.unreduced is not None:
            self.unreduced.count_forward()
        for experts in self.experts:
            experts.check()
