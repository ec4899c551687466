"""A folder for sys.path, in which spawned processes find `dashinfer`."""
