"""A session and what it is made of: everything below meets here."""

from patrickstar.runtime.manage import manage
from patrickstar.runtime.session import Session

__all__ = ["Session", "manage"]
