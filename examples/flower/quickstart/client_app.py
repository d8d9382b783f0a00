"""Client app: the model and the samples of a node."""

from flwr.app import Context
from flwr.clientapp import ClientApp
from torch import nn

from fedloom_sites.flower import Local, client
from quickstart.task import Net, load_data

app = ClientApp()


@client(app)
def local(context: Context) -> Local:
    """Return the model and the samples of this node."""
    trainset, testset = load_data(int(context.node_config["partition-id"]))
    return Local(
        Net(),
        trainset,
        loss=nn.CrossEntropyLoss(),
        testset=testset,
        folder=context.node_config.get("models"),
    )
