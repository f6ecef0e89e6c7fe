"""UCX settings that would crash or hang are set right or refused with the remedy."""

import pytest
from shoal.cluster.live.nixl_agent import TransferSetupError, prepare_ucx


def test_unset_modules_are_set_without_rdma_and_left_alone_with_it() -> None:
    environment: dict[str, str] = {}
    assert "UCX_MODULES was unset, now ^ib" in prepare_ucx(environment, is_rdma=False, is_loaded=False)
    assert environment == {"UCX_MODULES": "^ib"}
    assert prepare_ucx(environment, is_rdma=False, is_loaded=True) == ""
    bare: dict[str, str] = {}
    assert prepare_ucx(bare, is_rdma=True, is_loaded=False) == ""
    assert bare == {}


@pytest.mark.parametrize(
    ("environment", "is_loaded", "words"),
    [
        ({"UCX_MODULES": "all"}, False, r"UCX_MODULES = all, but there is no RDMA device: set UCX_MODULES=\^ib"),
        ({}, True, "NIXL was imported before UCX_MODULES was set"),
        ({"UCX_MODULES": "^ib", "UCX_TLS": "posix,self"}, False, "UCX_TLS = posix,self must include tcp"),
    ],
)
def test_settings_in_the_way_are_refused(environment: dict[str, str], is_loaded: bool, words: str) -> None:
    with pytest.raises(TransferSetupError, match=words):
        prepare_ucx(environment, is_rdma=False, is_loaded=is_loaded)
