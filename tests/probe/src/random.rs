//! Numbers that no cache foresees.

/// A generator (xorshift): the same seed gives the same numbers.
pub(crate) struct Random(u64);

impl Random {
    /// The generator of a seed, which must not be 0.
    pub(crate) fn new(seed: u64) -> Self {
        Self(seed)
    }

    /// The next number, less than `count`, which must not be 0.
    pub(crate) fn below(&mut self, count: usize) -> usize {
        self.0 ^= self.0 << 13;
        self.0 ^= self.0 >> 7;
        self.0 ^= self.0 << 17;
        (self.0 % count as u64) as usize
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn numbers_are_spread_over_the_whole_range() {
        let mut random = Random::new(1);
        let mut reached = [false; 64];
        (0..2000).for_each(|_| reached[random.below(64)] = true);
        assert_eq!(reached, [true; 64]);
    }
}
