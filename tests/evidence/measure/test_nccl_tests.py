"""Logs of nccl-tests of several versions, with what jobs put around them."""

import pytest

from forerun.common.errors import ForerunError
from forerun.core.cost.measured_files import read_network_profile
from forerun.core.program.types import Collective
from forerun.evidence.measure.nccl_tests import is_nccl_log, network_csv, nodes_of, read_nccl_log

NEW = """\
srun: job 4711 started
# Collective test starting: all_gather_perf
# nccl-tests version 2.17.1 nccl-headers=22707 nccl-library=22707
# nThread 1 nGpus 1 minBytes 1048576 maxBytes 8388608 step: 2(factor) warmup iters: 1 iters: 20 validation: 1 graph: 0
#
# Using devices
#  Rank  0 Group  0 Pid  11001 on      gpu-a device  0 [0000:1b:00] NVIDIA H100 80GB HBM3
#  Rank  1 Group  0 Pid  11002 on      gpu-a device  1 [0000:43:00] NVIDIA H100 80GB HBM3
#  Rank  2 Group  0 Pid  11003 on      gpu-a device  2 [0000:52:00] NVIDIA H100 80GB HBM3
#  Rank  3 Group  0 Pid  11004 on      gpu-a device  3 [0000:61:00] NVIDIA H100 80GB HBM3
NCCL version 2.27.7+cuda12.9
#
#                                                              out-of-place                       in-place
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)
     1048576         65536     float    none      -1    40.00   26.21   19.66       0    42.00   24.97   18.72       0
gpu-a:11001:11050 [0] NCCL INFO comm 0x55 rank 0 nranks 4 - Init COMPLETE
     2097152        131072     float    none      -1    50.00   41.94   31.46     N/A    52.00   40.33   30.25     N/A
           0             0     float    none      -1     0.10    0.00    0.00       0     0.10    0.00    0.00       0
     8388608
     8388608        524288     float    none      -1   100.00   83.89   62.92       0   100.00   12.34    9.25       0
# Out of bounds values : 0 OK
# Avg bus bandwidth    : 41.2
"""
OLD = """\
$ mpirun -np 2 ./build/all_reduce_perf -b 8 -e 16M -f 2
# nThread 1 nGpus 1 minBytes 8 maxBytes 16777216 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
#
# Using devices
#   Rank  0 Pid   2100 on      n01 device  0 [0x07] Tesla V100-SXM2-32GB
#   Rank  1 Pid   2101 on      n02 device  0 [0x07] Tesla V100-SXM2-32GB
#
#                                                     out-of-place                       in-place
#       size         count    type   redop     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)                     (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
           8             2   float     sum    21.00    0.00    0.00  0e+00    20.00    0.00    0.00  0e+00
    16777216       4194304   float     sum   1670.0   10.05   10.05  4e-07   1680.0    9.99    9.99  4e-07
 Out of bounds values : 0 OK
"""
NO_REDOP = """\
# nThread 1 nGpus 8 minBytes 1024 maxBytes 1024 step: 2(factor) warmup iters: 5 iters: 20 validation: 1
#
# Using devices
#
#                                             out-of-place                    in-place
#       size         count    type     time   algbw   busbw  error     time   algbw   busbw  error
#        (B)    (elements)             (us)  (GB/s)  (GB/s)            (us)  (GB/s)  (GB/s)
        1024            32   float    10.00    0.10    0.09  0e+00     N/A     N/A     N/A    N/A
"""


def write(folder, name, text):
    path = folder / name
    path.write_text(text)
    return path


def test_a_new_table_among_messages(tmp_path):
    path = write(tmp_path, "job.out", NEW)
    assert is_nccl_log(path)
    gather = (Collective.ALL_GATHER, 4, 1)
    assert read_nccl_log(path) == {
        (*gather, 1048576.0): pytest.approx(41e-6),
        (*gather, 2097152.0): pytest.approx(51e-6),
        (*gather, 8388608.0): pytest.approx(100e-6),  # the time in place does not go with its bandwidth
    }
    assert nodes_of(path) == 1


def test_an_old_table_named_by_its_command(tmp_path):
    path = write(tmp_path, "job.out", OLD)
    assert read_nccl_log(path) == {
        (Collective.ALL_REDUCE, 2, 1, 8.0): pytest.approx(20.5e-6),
        (Collective.ALL_REDUCE, 2, 1, 16777216.0): pytest.approx(1675e-6),
    }
    assert nodes_of(path) == 2


def test_a_table_without_ranks_and_redop_takes_threads_and_the_files_name(tmp_path):
    path = write(tmp_path, "reduce_scatter_8.log", NO_REDOP)
    assert read_nccl_log(path) == {(Collective.REDUCE_SCATTER, 8, 1, 1024.0): pytest.approx(10e-6)}


@pytest.mark.parametrize("prefix", ["[1,0]<stdout>: ", "[1,0]<stdout>:", "0: ", "12: "])
def test_prefixes_of_launchers_are_left_out(tmp_path, prefix):
    text = "".join(prefix + line + "\n" for line in NEW.splitlines())
    plain, tagged = write(tmp_path, "plain", NEW), write(tmp_path, "tagged", text)
    assert read_nccl_log(tagged) == read_nccl_log(plain)


def test_several_tests_in_one_log_keep_their_names_and_ranks(tmp_path):
    found = read_nccl_log(write(tmp_path, "all.log", NEW + OLD))
    assert {key[:3] for key in found} == {(Collective.ALL_GATHER, 4, 1), (Collective.ALL_REDUCE, 2, 1)}


def test_groups_of_a_split_have_a_stride(tmp_path):
    text = NEW
    for rank, group in ((1, 1), (3, 1)):
        text = text.replace(f"Rank  {rank} Group  0", f"Rank  {rank} Group  {group}")
    found = read_nccl_log(write(tmp_path, "job.out", text))
    assert {key[:3] for key in found} == {(Collective.ALL_GATHER, 2, 2)}


def test_a_log_becomes_a_network_profile(tmp_path):
    times = read_nccl_log(write(tmp_path, "job.out", NEW))
    path = write(tmp_path, "network.csv", network_csv(times))
    curve = read_network_profile(path).curves[Collective.ALL_GATHER, 4, 1]
    assert curve.size_bytes == (1048576, 2097152, 8388608)
    assert curve.time_s == pytest.approx((41e-6, 51e-6, 100e-6))
    assert not is_nccl_log(path)


@pytest.mark.parametrize(
    ("name", "text", "message"),
    [
        ("job.out", "nothing here\n", "job.out: no table of nccl-tests"),
        ("job.out", NO_REDOP, r"job.out, line 8: the log doesn't name its test; put the name \(all_reduce_perf"),
        (
            "alltoall.log",
            NO_REDOP.replace("# nThread 1 nGpus 8", "#"),
            "line 8: the log doesn't state its number of ranks",
        ),
        ("alltoall.log", NO_REDOP.replace("nGpus 8", "nGpus 1"), "no table of nccl-tests among more than one rank"),
    ],
)
def test_a_log_that_says_too_little_is_one_line(tmp_path, name, text, message):
    with pytest.raises(ForerunError, match=message) as caught:
        read_nccl_log(write(tmp_path, name, text))
    assert "\n" not in str(caught.value)


def test_a_log_that_is_missing_is_one_line(tmp_path):
    with pytest.raises(ForerunError, match=r"absent\.log: can't be read: No such file"):
        read_nccl_log(tmp_path / "absent.log")
