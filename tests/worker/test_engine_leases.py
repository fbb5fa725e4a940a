"""An instance counts the prompts whose KV it has for others."""

from __future__ import annotations

from tests.worker.test_engine_transfer import prompt_of, sending, to_send


def test_p_is_busy_until_its_kv_has_been_taken_though_no_request_is_left():
    driver, producer = sending(linger=4)
    driver.submit(to_send("a", prompt_of(18), max_tokens=1))
    while not driver.finished("a"):
        driver.turns(1)
    driver.turns(1)
    assert producer.has_work()
    assert (driver.core.stats().running, driver.core.stats().kv_leases) == (0, 1)
    assert not driver.core.is_idle()
    driver.run()
    assert driver.core.stats().kv_leases == 0
    assert driver.core.is_idle()
