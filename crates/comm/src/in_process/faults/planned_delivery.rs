//! What goes wrong with messages, and when: a pure function of a seed, so that a
//! failure can be seen again.

use std::collections::BTreeSet;
use std::str::FromStr;
use std::time::Duration;

use shardwright_core::{Rank, derive_seed};

/// No message stays on its way for longer than this.
pub(super) const LONGEST_DELAY: Duration = Duration::from_millis(2);
/// A message is overtaken by at most so many later ones.
pub(super) const MOST_OVERTAKING: u64 = 8;

/// The faults of every connection between ranks of one process.
///
/// Delay, reorder and duplicate are harmless: all messages arrive once, intact and in order.
/// Drop, corrupt and cut are harmful: the receiver loses the sender, with a reason. The shares
/// are of messages, from 0 to 1.
#[derive(Clone, Debug, PartialEq)]
pub struct Faults {
    /// What is drawn from.
    pub seed: u64,
    /// The share that arrives late, with all that follows.
    pub delay: f64,
    /// The share that is overtaken by later messages.
    pub reorder: f64,
    /// The share that arrives twice.
    pub duplicate: f64,
    /// The share that never arrives.
    pub drop: f64,
    /// The share of which bits are flipped, in the envelope, the head or the tensors.
    pub corrupt: f64,
    /// Whether the connection ends.
    pub cut: Option<Cut>,
    /// Harm comes only to messages from this number on, of each pair.
    pub after: u64,
    /// Harm comes only to messages from this rank.
    pub from: Option<Rank>,
    /// Harm comes only to messages to this rank.
    pub to: Option<Rank>,
    /// How long a missing message is waited for, and silence is borne.
    pub deadline: Duration,
}

/// How a connection ends.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Cut {
    /// Nothing passes any more, and nobody is told.
    Silent,
    /// The receiver is told that the connection has ended.
    Noticed,
}

/// What happens to one message.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct PlannedDelivery {
    /// How long it takes; later messages do not come before it.
    pub(super) delay: Duration,
    /// How many later messages overtake it, and its copy; none of the two when it does not arrive.
    pub(super) copies: [Option<u64>; 2],
    /// What is drawn from to choose the bits to flip.
    pub(super) corrupt: Option<u64>,
    /// The connection ends before it.
    pub(super) cut: Option<Cut>,
}

impl Default for Faults {
    fn default() -> Self {
        Self {
            seed: 0,
            delay: 0.0,
            reorder: 0.0,
            duplicate: 0.0,
            drop: 0.0,
            corrupt: 0.0,
            cut: None,
            after: 0,
            from: None,
            to: None,
            deadline: Duration::from_secs(5),
        }
    }
}

impl Faults {
    /// Much of everything that does no harm.
    #[cfg(test)]
    pub(crate) fn harmless(seed: u64) -> Self {
        Self {
            seed,
            delay: 0.1,
            reorder: 0.2,
            duplicate: 0.1,
            ..Self::default()
        }
    }

    /// What happens to a pair's message with this number.
    pub(super) fn plan(&self, from: Rank, to: Rank, number: u64) -> PlannedDelivery {
        let pair = derive_seed(self.seed, u64::from(from.0) << 32 | u64::from(to.0));
        let own = derive_seed(pair, number);
        let mut count = 0;
        let mut draw = || {
            count += 1;
            derive_seed(own, count)
        };
        // As many draws for every message, so that one share does not change what another chooses.
        let mut happens = |share: f64| {
            let (chance, detail) = (draw(), draw());
            // The upper half of a number below 2^63.
            let chance = f64::from((chance >> 31) as u32) / f64::from(u32::MAX);
            (share > 0.0 && chance <= share).then_some(detail)
        };
        let delay = happens(self.delay);
        let reorder = happens(self.reorder);
        let duplicate = happens(self.duplicate);
        let drop = happens(self.drop);
        let corrupt = happens(self.corrupt);
        let harmed = number >= self.after
            && self.from.is_none_or(|rank| rank == from)
            && self.to.is_none_or(|rank| rank == to);
        let overtaking = |detail: u64| 1 + detail % MOST_OVERTAKING;
        let arrives = !(harmed && drop.is_some());
        PlannedDelivery {
            delay: delay.map_or(Duration::ZERO, |detail| {
                LONGEST_DELAY * (detail % 1000) as u32 / 1000
            }),
            copies: [
                arrives.then_some(reorder.map_or(0, overtaking)),
                duplicate.filter(|_| arrives).map(overtaking),
            ],
            corrupt: corrupt.filter(|_| harmed),
            cut: self.cut.filter(|_| harmed),
        }
    }
}

/// Flips one or two bits: what the envelope's checksum finds without exception.
pub(super) fn flip_bits(bytes: &mut [u8], seed: u64) {
    let count = bytes.len() as u64 * 8;
    let draws = 1 + derive_seed(seed, 0) % 2;
    let places: BTreeSet<u64> = (1..=draws)
        .map(|draw| derive_seed(seed, draw) % count)
        .collect();
    for place in places {
        bytes[(place / 8) as usize] ^= 1 << (place % 8);
    }
}

/// A text that does not describe faults.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
pub enum FaultsError {
    /// No such fault.
    #[error(
        "{name:?} is not a fault; there are seed, delay, reorder, duplicate, drop, corrupt, cut, after, from, to and deadline, each as name=value"
    )]
    Unknown {
        /// What stands there.
        name: String,
    },
    /// A value that the fault cannot have.
    #[error("{name} is {found:?}; it has to be {allowed}")]
    Value {
        /// The fault.
        name: &'static str,
        /// Its value.
        found: String,
        /// What is allowed.
        allowed: &'static str,
    },
}

/// From words such as `seed=7 reorder=0.2 drop=0.01 after=30 from=1 deadline=2`.
impl FromStr for Faults {
    type Err = FaultsError;

    fn from_str(text: &str) -> Result<Self, FaultsError> {
        let mut faults = Self::default();
        for word in text.split_whitespace() {
            let unknown = || FaultsError::Unknown {
                name: word.to_owned(),
            };
            let (name, value) = word.split_once('=').ok_or_else(unknown)?;
            match name {
                "seed" => faults.seed = whole("seed", value)?,
                "delay" => faults.delay = share("delay", value)?,
                "reorder" => faults.reorder = share("reorder", value)?,
                "duplicate" => faults.duplicate = share("duplicate", value)?,
                "drop" => faults.drop = share("drop", value)?,
                "corrupt" => faults.corrupt = share("corrupt", value)?,
                "cut" => faults.cut = Some(cut(value)?),
                "after" => faults.after = whole("after", value)?,
                "from" => faults.from = Some(Rank(whole("from", value)?)),
                "to" => faults.to = Some(Rank(whole("to", value)?)),
                "deadline" => faults.deadline = seconds(value)?,
                _ => return Err(unknown()),
            }
        }
        Ok(faults)
    }
}

fn wrong(name: &'static str, found: &str, allowed: &'static str) -> FaultsError {
    FaultsError::Value {
        name,
        found: found.to_owned(),
        allowed,
    }
}

fn whole<T: FromStr>(name: &'static str, value: &str) -> Result<T, FaultsError> {
    let parsed = value.parse();
    parsed.map_err(|_| wrong(name, value, "a whole number"))
}

fn share(name: &'static str, value: &str) -> Result<f64, FaultsError> {
    let parsed = value.parse().ok();
    parsed
        .filter(|share| (0.0..=1.0).contains(share))
        .ok_or_else(|| wrong(name, value, "a share from 0 to 1"))
}

fn cut(value: &str) -> Result<Cut, FaultsError> {
    match value {
        "silent" => Ok(Cut::Silent),
        "noticed" => Ok(Cut::Noticed),
        _ => Err(wrong("cut", value, "silent or noticed")),
    }
}

fn seconds(value: &str) -> Result<Duration, FaultsError> {
    let parsed = value.parse().ok();
    parsed
        .and_then(|seconds| Duration::try_from_secs_f64(seconds).ok())
        .filter(|deadline| !deadline.is_zero())
        .ok_or_else(|| wrong("deadline", value, "a number of seconds above 0"))
}

#[cfg(test)]
mod tests {
    use super::*;

    fn plans(faults: &Faults, from: u32, to: u32) -> Vec<PlannedDelivery> {
        (0..1000)
            .map(|number| faults.plan(Rank(from), Rank(to), number))
            .collect()
    }

    #[test]
    fn plans_depend_on_the_seed_and_the_pair_and_on_nothing_else() {
        let faults = Faults::harmless(1);
        assert_eq!(plans(&faults, 0, 1), plans(&faults, 0, 1));
        assert_ne!(plans(&faults, 0, 1), plans(&faults, 1, 0));
        assert_ne!(plans(&faults, 0, 1), plans(&Faults::harmless(2), 0, 1));
    }

    #[test]
    fn shares_are_kept_and_do_not_change_each_other() {
        let alone: Faults = "seed=3 duplicate=0.25".parse().unwrap();
        let both: Faults = "seed=3 duplicate=0.25 drop=0.5".parse().unwrap();
        let count = |plans: &[PlannedDelivery], arrived: usize| {
            let copies = |plan: &&PlannedDelivery| plan.copies.iter().flatten().count() == arrived;
            plans.iter().filter(copies).count()
        };
        let (alone, both) = (plans(&alone, 0, 1), plans(&both, 0, 1));
        assert!((200..300).contains(&count(&alone, 2)));
        assert!((450..550).contains(&count(&both, 0)));
        for (one, other) in alone.iter().zip(&both) {
            assert!(one.copies == other.copies || other.copies == [None, None]);
        }
        assert_eq!(plans(&Faults::default(), 0, 1)[7].copies, [Some(0), None]);
    }

    #[test]
    fn harm_keeps_to_its_pair_and_begins_where_it_is_told_to() {
        let faults: Faults = "drop=1 corrupt=1 cut=silent after=30 from=2 to=0"
            .parse()
            .unwrap();
        let harmed = |plan: &PlannedDelivery| (plan.copies[0], plan.corrupt.is_some(), plan.cut);
        let spared = (Some(0), false, None);
        let plans_of = |from, to| plans(&faults, from, to);
        for (number, plan) in plans_of(2, 0).iter().enumerate() {
            let expected = if number < 30 {
                spared
            } else {
                (None, true, Some(Cut::Silent))
            };
            assert_eq!(harmed(plan), expected);
        }
        for (from, to) in [(0, 2), (2, 1), (1, 0)] {
            assert!(plans_of(from, to).iter().all(|plan| harmed(plan) == spared));
        }
    }

    #[test]
    fn flipped_bits_are_never_flipped_back() {
        for seed in 0..1000 {
            for size in [1, 3, 100] {
                let mut bytes = vec![0; size];
                flip_bits(&mut bytes, seed);
                assert!(bytes.iter().any(|byte| *byte != 0));
            }
        }
    }

    #[test]
    fn faults_are_read_from_words_and_mistakes_are_named() {
        let faults: Faults = "seed=7  delay=0.5 cut=noticed to=3 deadline=0.25"
            .parse()
            .unwrap();
        let expected = Faults {
            seed: 7,
            delay: 0.5,
            cut: Some(Cut::Noticed),
            to: Some(Rank(3)),
            deadline: Duration::from_millis(250),
            ..Faults::default()
        };
        assert_eq!(faults, expected);
        for (text, expected) in [
            ("drop", "\"drop\" is not a fault; there are seed, "),
            ("loss=1", "\"loss=1\" is not a fault; there are seed, "),
            ("drop=2", "drop is \"2\"; it has to be a share from 0 to 1"),
            (
                "drop=NaN",
                "drop is \"NaN\"; it has to be a share from 0 to 1",
            ),
            ("cut=1", "cut is \"1\"; it has to be silent or noticed"),
            ("after=-1", "after is \"-1\"; it has to be a whole number"),
            (
                "deadline=0",
                "deadline is \"0\"; it has to be a number of seconds above 0",
            ),
        ] {
            let error = text.parse::<Faults>().unwrap_err().to_string();
            assert!(error.starts_with(expected), "{error}");
        }
    }
}
