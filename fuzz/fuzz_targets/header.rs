#![no_main]

libfuzzer_sys::fuzz_target!(|input: &[u8]| shardwright_fuzzing::header(input));
