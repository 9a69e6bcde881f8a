"""PenstockConnector as it ships, but a node that is slow on a busy machine does not hang."""

from penstock.connectors.vllm.connector import PenstockConnector
from penstock.node import line

line.ANSWER_SECONDS = 60.0

__all__ = ["PenstockConnector"]
