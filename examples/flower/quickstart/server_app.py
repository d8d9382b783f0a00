"""Server app: a strategy of fedloom instead of Flower's FedAvg."""

from flwr.app import ArrayRecord, Context
from flwr.serverapp import Grid, ServerApp

from fedloom_sites.flower import Strategy
from quickstart.task import Net

app = ServerApp()


@app.main()
def main(grid: Grid, context: Context) -> None:
    """Train the models, and print the metrics of the nodes' models."""
    config, model = context.run_config, Net()
    local = {"lr": 0.1, "batch_size": 16, "epochs": 5}
    strategy = Strategy(str(config["method"]), model, min_nodes=int(config["min-nodes"]), local=local)
    rounds = int(config["num-server-rounds"])
    result = strategy.start(grid, ArrayRecord(model.state_dict()), num_rounds=rounds)
    print(result.evaluate_metrics_clientapp[rounds])
