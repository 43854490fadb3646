//! Extracts the paths that a Rust file uses. Parses only comments, literals, `use` trees and test items.

/// What one file uses.
#[derive(Debug)]
pub(super) struct Source {
    /// The file's module path in the crate.
    pub module: Vec<String>,
    /// All paths: from the crate's root where they lead there, otherwise as written.
    pub references: Vec<Reference>,
    /// Modules that this file declares for tests only.
    pub test_modules: Vec<Vec<String>>,
    /// Whether its documentation calls it pure.
    pub says_pure: bool,
}

/// A path and where it is used.
#[derive(Debug, PartialEq)]
pub(super) struct Reference {
    /// The segments; the first is `crate` for paths in the crate.
    pub path: Vec<String>,
    /// The line number, from one.
    pub line: usize,
}

#[derive(Clone, Debug, PartialEq)]
enum Token {
    Word(String),
    Colons,
    Other(char),
}

impl Source {
    /// Scans a file's text.
    pub(super) fn read(text: &str, module: Vec<String>) -> Self {
        let mut test_modules = Vec::new();
        let tokens = without_tests(&tokens(text), &mut test_modules);
        let references = Paths { tokens: &tokens, position: 0, found: Vec::new() }
            .collect()
            .into_iter()
            .map(|reference| Reference { path: resolve(reference.path, &module), ..reference })
            .collect();
        let test_modules = test_modules.into_iter().map(|name| [module.as_slice(), &[name]].concat()).collect();
        Self { module, references, test_modules, says_pure: says_pure(text) }
    }

    /// The top-level module of the file.
    pub(super) fn top(&self) -> Option<&str> {
        self.module.first().map(String::as_str)
    }
}

impl Reference {
    /// The top-level module of the crate that the path leads to.
    pub(super) fn top(&self) -> Option<&str> {
        match self.path.as_slice() {
            [first, top, ..] if first == "crate" => Some(top),
            _ => None,
        }
    }
}

/// Whether the file's own documentation has a sentence that begins with `Pure`.
fn says_pure(text: &str) -> bool {
    let documentation = text.lines().map_while(|line| line.strip_prefix("//!"));
    documentation.flat_map(str::split_whitespace).any(|word| word.trim_end_matches(['.', ':', ',', ';']) == "Pure")
}

/// Resolves `super` and `self` so that the path starts at the crate's root.
fn resolve(path: Vec<String>, module: &[String]) -> Vec<String> {
    let climbs = path.iter().take_while(|part| *part == "super").count();
    let base = match path.first().map(String::as_str) {
        Some("super") if climbs <= module.len() => &module[..module.len() - climbs],
        Some("self") => module,
        _ => return path,
    };
    let rest = &path[climbs.max(1)..];
    std::iter::once("crate".to_owned()).chain(base.iter().cloned()).chain(rest.iter().cloned()).collect()
}

/// Collects paths, expanding `a::{b, c}`.
struct Paths<'a> {
    tokens: &'a [(Token, usize)],
    position: usize,
    found: Vec<Reference>,
}

impl Paths<'_> {
    fn collect(mut self) -> Vec<Reference> {
        while self.position < self.tokens.len() {
            if matches!(self.peek(), Some(Token::Word(_))) {
                self.path(&[]);
            } else {
                self.position += 1;
            }
        }
        self.found
    }

    fn peek(&self) -> Option<&Token> {
        self.tokens.get(self.position).map(|(token, _)| token)
    }

    /// Reads one path or `use` tree after a prefix.
    fn path(&mut self, prefix: &[String]) {
        let line = self.tokens.get(self.position).map_or(0, |(_, line)| *line);
        let mut path = prefix.to_vec();
        loop {
            match self.peek() {
                Some(Token::Word(word)) => path.push(word.clone()),
                Some(Token::Other('{')) if !path.is_empty() => return self.group(&path),
                _ => break,
            }
            self.position += 1;
            if self.peek() != Some(&Token::Colons) {
                break;
            }
            self.position += 1;
        }
        if path.len() > 1 || prefix.is_empty() && path.len() == 1 && path[0] == "crate" {
            self.found.push(Reference { path, line });
        }
    }

    fn group(&mut self, prefix: &[String]) {
        self.position += 1;
        loop {
            match self.peek() {
                None => return,
                Some(Token::Other('}')) => {
                    self.position += 1;
                    return;
                }
                Some(Token::Word(_)) => self.path(prefix),
                Some(_) => self.position += 1,
            }
        }
    }
}

/// Drops items marked `#[cfg(test)]` and records the modules among them that have files of their own.
fn without_tests(tokens: &[(Token, usize)], modules: &mut Vec<String>) -> Vec<(Token, usize)> {
    let mark = ['#', '['].map(Token::Other).into_iter();
    let mark: Vec<Token> = mark
        .chain([Token::Word("cfg".into()), Token::Other('('), Token::Word("test".into())])
        .chain([')', ']'].map(Token::Other))
        .collect();
    let mut kept = Vec::new();
    let mut position = 0;
    while position < tokens.len() {
        let rest = &tokens[position..];
        if rest.len() >= mark.len() && rest.iter().zip(&mark).all(|((token, _), mark)| token == mark) {
            position += mark.len();
            let end = item_end(tokens, position);
            modules.extend(declared_module(&tokens[position..end]));
            position = end;
        } else {
            kept.push(rest[0].clone());
            position += 1;
        }
    }
    kept
}

/// The end of the item that starts here: after its `;` or its outermost braces.
fn item_end(tokens: &[(Token, usize)], start: usize) -> usize {
    let mut depth = 0_usize;
    let mut is_use = false;
    for (offset, (token, _)) in tokens[start..].iter().enumerate() {
        match token {
            Token::Word(word) if word == "use" && depth == 0 => is_use = true,
            Token::Other('{' | '(' | '[') => depth += 1,
            Token::Other(close @ ('}' | ')' | ']')) => {
                depth = depth.saturating_sub(1);
                if depth == 0 && *close == '}' && !is_use {
                    return start + offset + 1;
                }
            }
            Token::Other(';') if depth == 0 => return start + offset + 1,
            _ => {}
        }
    }
    tokens.len()
}

fn declared_module(item: &[(Token, usize)]) -> Option<String> {
    let words: Vec<&Token> = item.iter().map(|(token, _)| token).collect();
    words.windows(3).find_map(|window| match window {
        [Token::Word(keyword), Token::Word(name), Token::Other(';')] if keyword == "mod" => Some(name.clone()),
        _ => None,
    })
}

/// Splits the text into words, `::` and single characters, without whitespace, comments and literals.
fn tokens(text: &str) -> Vec<(Token, usize)> {
    let mut reader = Reader { rest: text, line: 1 };
    let mut tokens = Vec::new();
    while let Some(first) = reader.rest.chars().next() {
        let line = reader.line;
        if let Some(length) = skipped(reader.rest) {
            reader.advance(length);
        } else if first.is_alphanumeric() || first == '_' {
            let end = |character: char| !(character.is_alphanumeric() || character == '_');
            let length = reader.rest.find(end).unwrap_or(reader.rest.len());
            tokens.push((Token::Word(reader.rest[..length].to_owned()), line));
            reader.advance(length);
        } else if reader.rest.starts_with("::") {
            tokens.push((Token::Colons, line));
            reader.advance(2);
        } else {
            if !first.is_whitespace() {
                tokens.push((Token::Other(first), line));
            }
            reader.advance(first.len_utf8());
        }
    }
    tokens
}

struct Reader<'a> {
    rest: &'a str,
    line: usize,
}

impl Reader<'_> {
    fn advance(&mut self, length: usize) {
        let (passed, rest) = self.rest.split_at(length);
        self.line += passed.matches('\n').count();
        self.rest = rest;
    }
}

/// The length of the comment or literal at the current position, if there is one.
fn skipped(text: &str) -> Option<usize> {
    if text.starts_with("//") {
        return Some(text.find('\n').unwrap_or(text.len()));
    }
    if text.starts_with("/*") {
        return Some(block_comment(text));
    }
    let literal = text.strip_prefix('b').or_else(|| text.strip_prefix('c')).unwrap_or(text);
    let prefix = text.len() - literal.len();
    if let Some(raw) = literal.strip_prefix('r') {
        let hashes = raw.len() - raw.trim_start_matches('#').len();
        if raw[hashes..].starts_with('"') {
            let end = format!("\"{}", "#".repeat(hashes));
            let body = &raw[hashes + 1..];
            let length = body.find(&end).map_or(body.len(), |found| found + end.len());
            return Some(prefix + 1 + hashes + 1 + length);
        }
    }
    match literal.chars().next()? {
        '"' => Some(prefix + quoted(literal, '"')),
        // A lifetime has no closing quote after its first character.
        '\'' if literal[1..].starts_with('\\') || literal.chars().nth(2) == Some('\'') => {
            Some(prefix + quoted(literal, '\''))
        }
        _ => None,
    }
}

fn block_comment(text: &str) -> usize {
    let (mut depth, mut position) = (0_usize, 0);
    while position < text.len() {
        let rest = &text[position..];
        if rest.starts_with("/*") {
            depth += 1;
            position += 2;
        } else if rest.starts_with("*/") {
            depth -= 1;
            position += 2;
            if depth == 0 {
                return position;
            }
        } else {
            position += rest.chars().next().map_or(1, char::len_utf8);
        }
    }
    text.len()
}

fn quoted(text: &str, quote: char) -> usize {
    let mut characters = text.char_indices().skip(1);
    while let Some((position, character)) = characters.next() {
        if character == '\\' {
            characters.next();
        } else if character == quote {
            return position + 1;
        }
    }
    text.len()
}
