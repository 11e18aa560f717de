"""From LLaVA-format records to batches: records, preprocess, dataset, sampler, collate."""
