"""Pages of the documentation that follow from the code: a page a method, a page a dataset.

They are written when the site is built (`docs/hook.py`), so that a method or dataset that is
registered has a page, and a page cannot differ from the code. Nothing of them is kept.
"""
