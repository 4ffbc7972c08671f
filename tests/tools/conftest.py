"""Tools write what the tests of data do, as quickly."""

from tests.data.conftest import without_waiting_for_the_disk as without_waiting_for_the_disk
