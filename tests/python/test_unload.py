"""A model gives its memory back for some time, and its requests go on afterwards."""

from __future__ import annotations

from allspark import AsStatus, GenerateRequestStatus, ModelState
from engine_fixture import install_engine, read_all

OK = AsStatus.ALLSPARK_SUCCESS
CONFIG = {"seed": 3, "temperature": 1.5, "max_new_tokens": 200}


def test_unloaded_and_loaded_again(checkpoint):
    engine, _ = install_engine(checkpoint)
    assert engine.unload_device_mem("m") == AsStatus.ALLSPARK_INVALID_CALL_ERROR
    assert engine.last_error() == "unload_device_mem: model 'm' is Initial; it must be Running"
    assert engine.start_model("m") == OK

    def start():
        status, handle, queue = engine.start_request_ids("m", None, [1, 2, 3], CONFIG)
        assert status == OK, engine.last_error()
        return handle, queue

    expected = read_all(start()[1])
    loaded = engine.get_as_engine_stat("m").used_device_memory_pool_size
    running = start()[1]
    first = running.Get().ids_from_generate
    assert engine.unload_device_mem("m") == OK, engine.last_error()
    assert engine.unload_device_mem("m") == AsStatus.ALLSPARK_INVALID_CALL_ERROR
    assert engine.get_model_state("m") == ModelState.Running
    assert engine.get_as_engine_stat("m").used_device_memory_pool_size == 0 < loaded
    waiting = start()[1]
    stopped, stopped_queue = start()
    assert engine.stop_request("m", stopped) == engine.sync_request("m", stopped) == OK
    assert stopped_queue.finish_reason == "cancelled"
    assert waiting.GenerateStatus() == GenerateRequestStatus.Init
    assert engine.find_prefix("m", [1] * 64) == 0
    assert engine.load_device_mem("m") == OK, engine.last_error()
    assert engine.get_as_engine_stat("m").used_device_memory_pool_size == loaded
    assert first + read_all(running) == expected == read_all(waiting)
    assert engine.load_device_mem("m") == AsStatus.ALLSPARK_INVALID_CALL_ERROR
    assert engine.unload_device_mem("m") == engine.stop_model("m") == OK
