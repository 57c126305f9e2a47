"""The layers between the linears: attention, norm, embedding and loss, each with its gradient rule."""
