"""The same model on several clusters, one of them described in a file: what is the best plan of each?"""

from pathlib import Path

import forerun

OWN = Path(__file__).parent / "my_cluster.yaml"


def main() -> None:
    for cluster in ("a100-80gb-sxm", "h100-sxm", "b200", OWN):
        result = forerun.search(
            "llama-3.1-8b", cluster, n_gpus=8, seq_len=4096, global_batch=32, fixed={"pp": 1, "cp": 1}, keep=1
        )
        best = result.best
        if best is None:
            print(f"{result.cluster:16} nothing fits")
        else:
            print(f"{result.cluster:16} {best.tokens_per_s_per_gpu:8,.0f} tokens/s/GPU  {best.plan.describe()}")


if __name__ == "__main__":  # a search starts processes
    main()
