"""Find the best plan for a Hugging Face config.json, and see why the others are not."""

from pathlib import Path

import forerun

CONFIG = Path(__file__).parent / "llama-3.1-8b" / "config.json"


def main() -> None:
    result = forerun.search(CONFIG, "h100-sxm", n_gpus=16, seq_len=8192, global_batch=64, keep=5)
    print(result.counts)
    for prediction in result.top(5):
        plan, memory_gib = prediction.plan, prediction.peak_reserved_gib
        print(f"{prediction.step_time_s:6.2f} s  {memory_gib:5.1f} GiB  {plan.describe()}, {plan.stack}")
    print("out of memory, by the largest part:", result.out_of_memory)
    rows = result.to_rows()  # or result.to_dataframe(), with pandas
    print(f"{len(rows)} plans, {sum(row['status'] == 'ok' for row in rows)} of them simulated and fitting")


if __name__ == "__main__":  # a search starts processes
    main()
