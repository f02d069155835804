"""What every worker and task cost. Pure: the store keeps what is settled here, and hands over what is to be settled."""
