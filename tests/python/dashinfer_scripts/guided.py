"""A test: JSON for three schemas at once, through the raw call, the vocabulary in the config.

usage: guided.py MODEL FOLDER
"""

import json
import sys
import unittest
from concurrent.futures import ThreadPoolExecutor

import torch
import torch.utils.dlpack
from dashinfer import allspark
from dashinfer.allspark import AsStatus, VocabType
from dashinfer.allspark.engine import TargetDevice

SCHEMAS = (
    {
        "type": "object",
        "properties": {
            "user": {
                "type": "object",
                "properties": {
                    "name": {"type": "string", "minLength": 2, "maxLength": 8},
                    "age": {"type": "integer", "minimum": 0, "maximum": 120},
                    "code": {"type": "string", "pattern": "^[A-Z]{3}[0-9]{4}$"},
                },
                "required": ["name", "age", "code"],
            },
            "language": {"type": "string", "enum": ["en", "es", "fr"]},
        },
        "required": ["user", "language"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"value": {"anyOf": [{"type": "null"}, {"type": "boolean"}]}},
        "required": ["value"],
        "additionalProperties": False,
    },
    {
        "type": "object",
        "properties": {"place": {"type": "string", "enum": ["Japan", "Viet\u200bnam", "日本"]}},
        "required": ["place"],
        "additionalProperties": False,
    },
)


class GuidedTest(unittest.TestCase):
    @classmethod
    def setUpClass(cls):
        loader = allspark.HuggingFaceModel(
            sys.argv[1], "demo", in_memory_serialize=False, trust_remote_code=True
        )
        cls.engine = allspark.Engine()
        loader.load_model(direct_load=False, load_format="auto")
        loader.serialize_to_path(
            cls.engine, model_output_dir=sys.argv[2], multinode_mode=False, skip_if_exists=True
        )
        builder = loader.create_reference_runtime_config_builder(
            "demo", TargetDevice.CPU, device_ids=[0], max_batch=3
        )
        builder.max_length(2000)
        builder.prefill_cache(False)
        config = builder.build()
        cls.name = config.model_name
        cls.tokenizer = loader.get_tokenizer()
        cls.builder = loader.create_reference_generation_config_builder(config)
        cls.builder.update({"temperature": 0.1, "top_k": 1, "top_p": 0.1, "max_length": 2000})
        cls.engine.build_model_from_config_struct(config)
        assert cls.engine.start_model(cls.name) == AsStatus.ALLSPARK_SUCCESS

    @classmethod
    def tearDownClass(cls):
        assert cls.engine.stop_model(cls.name) == AsStatus.ALLSPARK_SUCCESS

    def process(self, schema, more):
        config = {**self.builder.build(), **more}
        config["response_format"] = {"type": "json_object", "json_schema": json.dumps(schema)}
        ids = self.tokenizer(["Who are you?"], return_tensors="pt")["input_ids"]
        status, handle, queue = self.engine.start_request(
            self.name,
            {"input_ids": torch.utils.dlpack.to_dlpack(ids)},
            generate_config=config,
        )
        self.assertEqual(status, AsStatus.ALLSPARK_SUCCESS, self.engine.last_error())
        output = []
        while True:
            status = queue.GenerateStatus()
            if status == allspark.GenerateRequestStatus.Init:
                continue
            self.assertIn(
                status,
                (
                    allspark.GenerateRequestStatus.Generating,
                    allspark.GenerateRequestStatus.GenerateFinished,
                ),
            )
            elements = queue.Get()
            if elements is not None:
                output.extend(elements.ids_from_generate)
            if status == allspark.GenerateRequestStatus.GenerateFinished:
                break
        value = json.loads(self.tokenizer.decode(output, skip_special_tokens=True))
        self.assertEqual(set(value), set(schema["properties"]))
        for name, part in schema["properties"].items():
            self.assertIn(value[name], part.get("enum", [value[name]]))
        self.engine.release_request(self.name, request_handle=handle)
        return output

    def generate(self, more):
        with ThreadPoolExecutor(3) as pool:
            return list(pool.map(lambda schema: self.process(schema, more), SCHEMAS))

    def test_with_the_vocabulary_of_the_reference_config(self):
        self.generate({})

    def test_with_a_vocabulary_alone(self):
        vocab = {
            "vocab": self.tokenizer.get_vocab(),
            "vocab_type": VocabType.VOCAB_TYPE_BPE,
        }
        self.assertEqual(self.generate(vocab), self.generate({}))


if __name__ == "__main__":
    unittest.main(argv=["guided"])
