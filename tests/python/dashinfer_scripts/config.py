"""A test: a runtime config from a dict prints as one that is set by hand."""

import unittest

from dashinfer.allspark._allspark import AsModelConfig
from dashinfer.allspark.runtime_config import AsModelRuntimeConfigBuilder


class RuntimeConfigTest(unittest.TestCase):
    def test_from_dict(self):
        expected = AsModelConfig()
        expected.model_name = "test_model"
        expected.compute_unit = "CUDA:0,1"
        expected.engine_max_length = 100
        expected.engine_max_batch = 32
        expected.num_threads = 2

        builder = AsModelRuntimeConfigBuilder()
        builder.from_dict(
            {
                "model_name": "test_model",
                "compute_unit": {
                    "device_type": "cuda",
                    "device_ids": [0, 1],
                    "compute_thread_in_device": 2,
                },
                "engine_max_length": 100,
                "engine_max_batch": 32,
            }
        )
        actual = builder.build()
        print("expected:", expected)
        print("actual:  ", actual)
        self.assertEqual(str(expected), str(actual))


if __name__ == "__main__":
    unittest.main(argv=["config"])
