"""Expert parallelism: groups, dispatch / combine, the experts hook, loading and saving of one rank's share."""
