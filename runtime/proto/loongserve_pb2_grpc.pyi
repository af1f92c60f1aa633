# Written by hand: the generator makes no types for services. A test compares it with the descriptor.
import grpc
import grpc.aio

from loongserve.runtime.proto import loongserve_pb2 as pb

class LoongStub:
    """The client, on an asyncio channel."""

    def __init__(self, channel: grpc.aio.Channel) -> None: ...
    Generate: grpc.aio.UnaryStreamMultiCallable[pb.GenerateRequest, pb.GenerateResponse]
    Abort: grpc.aio.UnaryUnaryMultiCallable[pb.AbortRequest, pb.AbortResponse]
    GetCluster: grpc.aio.UnaryUnaryMultiCallable[pb.GetClusterRequest, pb.Cluster]

class LoongServicer:
    """What a server implements, on an asyncio server."""

    async def Generate(
        self, request: pb.GenerateRequest, context: grpc.aio.ServicerContext[pb.GenerateRequest, pb.GenerateResponse]
    ) -> None: ...
    async def Abort(
        self, request: pb.AbortRequest, context: grpc.aio.ServicerContext[pb.AbortRequest, pb.AbortResponse]
    ) -> pb.AbortResponse: ...
    async def GetCluster(
        self, request: pb.GetClusterRequest, context: grpc.aio.ServicerContext[pb.GetClusterRequest, pb.Cluster]
    ) -> pb.Cluster: ...

def add_LoongServicer_to_server(servicer: LoongServicer, server: grpc.aio.Server) -> None: ...
