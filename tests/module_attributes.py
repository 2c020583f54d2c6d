"""A mypy plugin: what a network of another library holds under a name is not known to be a tensor or a module.

`nn.Module.__getattr__` is declared as `Tensor | Module`, which fits no use of `model.blocks[0].attn.num_heads`.
"""

from collections.abc import Callable

from mypy.plugin import AttributeContext, Plugin
from mypy.types import AnyType, Type, TypeOfAny, UnionType, get_proper_type


class ModuleAttributes(Plugin):
    def get_attribute_hook(self, fullname: str) -> Callable[[AttributeContext], Type] | None:
        return _any_if_undeclared if fullname.startswith("torch.nn.modules.module.Module.") else None


def _any_if_undeclared(context: AttributeContext) -> Type:
    declared = get_proper_type(context.default_attr_type)
    return AnyType(TypeOfAny.explicit) if isinstance(declared, UnionType) else declared


def plugin(version: str) -> type[Plugin]:
    return ModuleAttributes
