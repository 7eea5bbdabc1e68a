//! Degrees that are lowered where a job has too few ranks for them.

use serde_json::{Map, Value, json};

use super::{Config, ConfigError, object_of};

/// The degrees that may be lowered.
pub(super) const DEGREES: [&str; 3] = [
    "pipeline_parallel_degree",
    "tensor_parallel_degree",
    "sharded_data_parallel_degree",
];

impl Config {
    /// As [`parse`](Self::parse), for a job of so many ranks. If they do not fit the degrees, those that `elastic_degrees`
    /// names are lowered: to the most stages times tensor-parallel ranks that fit, then to the most of the latter, then to
    /// the most shards. A configuration that fits in no way is returned as it was given.
    ///
    /// # Errors
    ///
    /// As `parse`.
    pub fn parse_for(text: &str, world: u32) -> Result<Self, ConfigError> {
        let asked = Self::parse(text)?;
        if asked.elastic_degrees.is_none() || asked.check_world(world).is_ok() {
            return Ok(asked);
        }
        let mut given = object_of(text);
        given.remove("partitions");
        let fitted = candidates(&asked).into_iter().find_map(|degrees| {
            let mut given: Map<String, Value> = given.clone();
            let named = DEGREES.iter().zip(degrees);
            given.extend(named.map(|(name, degree)| ((*name).to_owned(), json!(degree))));
            let config = Self::parse(&Value::Object(given).to_string()).ok()?;
            config.check_world(world).is_ok().then_some(config)
        });
        Ok(fitted.unwrap_or(asked))
    }
}

/// All values of the three degrees that may be, the best first.
fn candidates(asked: &Config) -> Vec<[u32; 3]> {
    let elastic = asked.elastic_degrees.as_deref().unwrap_or_default();
    let is_elastic = |name: &str| elastic.split(',').any(|one| one.trim() == name);
    // What a tensor's dimension or a number of replicas is divided by can go down to its divisors only.
    let values = |name: &str, degree: u32, any: bool| -> Vec<u32> {
        let lower = (1..degree).filter(|one| any || degree.is_multiple_of(*one));
        let lower = lower.filter(|_| is_elastic(name));
        lower.chain([degree]).collect()
    };
    let [pipeline, tensor, sharded] = DEGREES;
    let mut found = Vec::new();
    for pp in values(pipeline, asked.pipeline_parallel_degree, true) {
        for tp in values(tensor, asked.tensor_parallel_degree, false) {
            for shards in values(sharded, asked.sharded_data_parallel_degree, false) {
                found.push([pp, tp, shards]);
            }
        }
    }
    found.sort_by_key(|&[pp, tp, shards]| std::cmp::Reverse((pp * tp, tp, shards)));
    found
}

#[cfg(test)]
mod tests {
    use super::*;

    fn degrees(given: &Value, world: u32) -> [u32; 3] {
        let config = Config::parse_for(&given.to_string(), world).expect("a good configuration");
        [
            config.pipeline_parallel_degree,
            config.tensor_parallel_degree,
            config.sharded_data_parallel_degree,
        ]
    }

    #[test]
    fn degrees_that_are_named_are_lowered_to_what_fits() {
        let pipeline = json!({"ddp": true, "pipeline_parallel_degree": 4,
            "elastic_degrees": "pipeline_parallel_degree"});
        for (world, pp) in [(4, 4), (8, 4), (3, 3), (2, 2), (6, 3), (5, 1), (1, 1)] {
            assert_eq!(degrees(&pipeline, world), [pp, 1, 1], "{world}");
        }
        let both = json!({"ddp": true, "partitions": 2, "tensor_parallel_degree": 2,
            "elastic_degrees": "pipeline_parallel_degree, tensor_parallel_degree"});
        for (world, pp, tp) in [(4, 2, 2), (3, 1, 1), (2, 1, 2), (6, 1, 2), (12, 2, 2)] {
            assert_eq!(degrees(&both, world), [pp, tp, 1], "{world}");
        }
        let sharded = json!({"ddp": true, "pipeline_parallel_degree": 2, "sharded_data_parallel_degree": 4,
            "elastic_degrees": "sharded_data_parallel_degree"});
        for (world, shards) in [(8, 4), (4, 2), (6, 1), (16, 4), (12, 2)] {
            assert_eq!(degrees(&sharded, world), [2, 1, shards], "{world}");
        }
    }

    #[test]
    fn others_stay_and_defaults_follow() {
        let fixed = json!({"ddp": true, "pipeline_parallel_degree": 2, "tensor_parallel_degree": 2,
            "elastic_degrees": "pipeline_parallel_degree"});
        assert_eq!(degrees(&fixed, 2), [1, 2, 1]);
        let config = Config::parse_for(&fixed.to_string(), 3).expect("it is checked later");
        let text = config.check_world(3).expect_err("3 is odd").to_string();
        assert!(text.contains('3'), "{text}");
        let alone =
            json!({"pipeline_parallel_degree": 4, "elastic_degrees": "pipeline_parallel_degree"});
        let config = Config::parse_for(&alone.to_string(), 3).expect("good");
        assert_eq!((config.partitions, config.active_microbatches), (3, 5));
        // One replica of a stage would do, but more than one needs ddp.
        assert_eq!(degrees(&alone, 5), [4, 1, 1]);
        let again = Config::parse_for(&config.to_json(), 3);
        assert_eq!(again, Ok(config));
    }

    #[test]
    fn only_degrees_can_be_named() {
        for wrong in [
            "",
            "microbatches",
            "pipeline_parallel_degree,",
            "pipeline_parallel_degree pipeline_parallel_degree",
        ] {
            let text = Config::parse(&json!({ "elastic_degrees": wrong }).to_string())
                .expect_err("to be refused")
                .to_string();
            assert!(
                text.contains("elastic_degrees") && text.contains(DEGREES[2]),
                "{text}"
            );
        }
    }
}
