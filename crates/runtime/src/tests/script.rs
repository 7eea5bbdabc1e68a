//! What the simulated tasks do.

use std::collections::VecDeque;

use shardwright_wire::Value;

/// A reproducible source of choices.
#[derive(Clone)]
pub(super) struct Dice(pub(super) u64);

impl Dice {
    pub(super) fn roll(&mut self, sides: usize) -> usize {
        self.0 = self.0.wrapping_add(0x9e37_79b9_7f4a_7c15);
        let mut mixed = self.0;
        mixed = (mixed ^ (mixed >> 30)).wrapping_mul(0xbf58_476d_1ce4_e5b9);
        mixed = (mixed ^ (mixed >> 27)).wrapping_mul(0x94d0_49bb_1331_11eb);
        ((mixed ^ (mixed >> 31)) % sides as u64) as usize
    }
}

/// What a task still has to do.
#[derive(Clone, Debug)]
pub(super) enum Operation {
    /// Calls these ranks at once, with these seeds, and waits for all.
    Call(Vec<(u32, u32)>),
    Control(u32),
    AwaitBackward,
}

/// A task's script follows from its seed, so that nothing but the seed has to travel.
pub(super) fn script(seed: i64, depth: u32, world: u32, root: bool) -> VecDeque<Operation> {
    let mut dice = Dice(seed.cast_unsigned());
    let mut operations = VecDeque::new();
    for _ in 0..dice.roll(3) {
        if depth > 0 {
            let calls = 1 + dice.roll(2);
            let call =
                |dice: &mut Dice| (dice.roll(world as usize) as u32, dice.roll(1 << 20) as u32);
            operations.push_back(Operation::Call(
                (0..calls).map(|_| call(&mut dice)).collect(),
            ));
        }
    }
    if root && dice.roll(4) == 0 {
        operations.push_front(Operation::Control(dice.roll(world as usize) as u32));
    }
    if root && dice.roll(5) > 0 {
        operations.push_back(Operation::AwaitBackward);
        if depth > 0 {
            operations.push_back(Operation::Call(vec![(dice.roll(world as usize) as u32, 7)]));
        }
    }
    operations
}

pub(super) fn answer(seed: i64) -> Value {
    Value::Int(seed.wrapping_mul(3) + 1)
}
