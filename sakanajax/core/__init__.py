"""What every method shares and no paper owns: configs, training, checkpoints, results, assets, meshes."""
