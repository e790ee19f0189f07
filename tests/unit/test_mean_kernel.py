"""The kernel that adds up gradients, on the CPU."""

from tests.support.reduce_checks import check_means


def test_means_are_those_of_the_same_arithmetic_op_by_op():
    check_means("cpu")
