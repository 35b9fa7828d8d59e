"""Split models whose attributes the code around the cuts changes."""

import pytest
import torch
from torch import nn

from tests.pipeline.test_split_found import WIDTH, Model, Refused, check_equal


class NextScale(Model):
    """A number that the code after a cut leaves for the next call, which reads it before the cut."""

    def make(self) -> None:
        self.scale = 1.0

    def forward(self, x):
        x = self.b(self.a(x) * self.scale)
        self.scale += 1.0
        return self.c(x)


class NextMean(Model):
    def make(self) -> None:
        self.mean = torch.zeros(WIDTH)

    def forward(self, x):
        x = self.b(self.a(x) + self.mean)
        self.mean = x.detach().mean(0)
        return self.c(x)


class NextInObject(Model):
    """In an object, and in a submodule that encloses the cut."""

    def make(self) -> None:
        self.inner = NextInObject.Inner(self.b, self.c)
        del self.b, self.c

    class Inner(nn.Module):
        def __init__(self, b: nn.Module, c: nn.Module) -> None:
            super().__init__()
            self.b, self.c = b, c
            self.counts = Counts()

        def forward(self, x):
            x = self.c(self.b(x * self.counts.calls))
            self.counts.calls += 1
            return x

    def forward(self, x):
        return self.inner(self.a(x))


class Counts:
    def __init__(self) -> None:
        self.calls = 1


class ChangedObject(Model):
    """Which the code before a cut changes, so that each stage of a process would."""

    def make(self) -> None:
        self.counts = [Counts()]

    def forward(self, x):
        self.counts[0].calls += 1
        x = self.b(self.a(x) * self.counts[0].calls)
        return self.c(x) * self.counts[0].calls


class LateObject(Model):
    """Objects that the last stage changes, that a submodule changes, and that each call makes."""

    def make(self) -> None:
        self.late, self.of_submodule, self.own = Counts(), Counts(), Counts()
        self.a = Counting(self.of_submodule)

    def forward(self, x):
        self.own = Counts()
        self.own.calls += 2
        x = self.c(self.b(self.a(x) * self.own.calls))
        self.late.calls += 1
        return x * self.late.calls


class Counting(nn.Linear):
    def __init__(self, counts: "Counts") -> None:
        super().__init__(WIDTH, WIDTH)
        self.counts = counts

    def forward(self, x):
        self.counts.calls += 1
        return super().forward(x)


class SetAnew(Model):
    """Attributes that every call sets before it reads them, and one that only the stage after the cut reads."""

    def make(self) -> None:
        self.passed, self.losses, self.late = False, [], 1.0

    def forward(self, x):
        self.passed, self.losses = False, []
        x = self.a(x)
        if not self.passed and not self.losses:
            x = x * 2.0
        x = self.b(x) * self.late
        self.passed = True
        self.late = self.late + 1.0
        self.losses.append(x.mean())
        return self.c(x) + sum(self.losses)


EQUAL = {
    "attributes that each call sets anew": SetAnew,
    "objects that one stage changes": LateObject,
}


@pytest.mark.parametrize("name", EQUAL)
@pytest.mark.parametrize("with_example", [False, True])
def test_attributes_of_one_stage_are_those_of_the_model(unchecked_shapes, name, with_example):
    check_equal(EQUAL[name](), ["b", "c"], with_example)


REFUSED = {
    "number for the next call": Refused(NextScale, r"in stage 0 .* attribute 'scale', which a later stage changes for"),
    "tensor for the next call": Refused(NextMean, r"in stage 0 .* attribute 'mean', which .* pass it to forward"),
    "object that stages share": Refused(ChangedObject, r"the object in attribute 'counts', made by stage 0; each"),
    "object for the next call": Refused(NextInObject, r"in stage 0 .* attribute 'inner\.counts', which a later"),
}


@pytest.mark.parametrize("name", REFUSED)
@pytest.mark.parametrize("with_example", [False, True])
def test_attributes_that_stages_cannot_know_are_refused_by_name(unchecked_shapes, name, with_example):
    kind, says = REFUSED[name]
    cuts = ["inner.b", "inner.c"] if kind is NextInObject else ["b", "c"]
    with pytest.raises(ValueError, match=says):
        check_equal(kind(), cuts, with_example)


class Registry(dict):
    def get(self, key):
        return self[key]


REGISTRY = Registry(scale=2.0, of=[torch.ones(1)])


class WithRegistry(Model):
    """A global dict of a class with methods of its own."""

    def forward(self, x):
        REGISTRY["last"] = x
        return self.c(self.b(self.a(x))) * REGISTRY.get("scale")


def test_a_global_dict_may_have_methods_of_its_own(unchecked_shapes):
    check_equal(WithRegistry(), ["b", "c"], True)
    assert type(REGISTRY["last"]) is torch.Tensor
