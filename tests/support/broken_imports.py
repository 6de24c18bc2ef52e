"""A script that makes imports fail in a fresh interpreter."""

BLOCKER = """
import importlib.abc, sys
class Blocker(importlib.abc.MetaPathFinder):
    def find_spec(self, name, path=None, target=None):
        if {{name.split(".")[0], name}} & {{*{blocked!r}}}:
            raise {error}("broken on purpose")
sys.meta_path.insert(0, Blocker())
"""
