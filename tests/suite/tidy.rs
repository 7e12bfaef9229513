//! What the house style says and a machine can hold: the import law, sizes, absences, and pages that name what is there.
//!
//! Takes the files that git knows or would take; gives sentences with path and line. It judges no wording, and reads
//! Rust only as far as comments, strings and test modules can be told from code.

use std::collections::{BTreeMap, BTreeSet};
use std::env;
use std::fs;
use std::path::{Component, Path, PathBuf};
use std::process::Command;

use gpufleet_tests::programs::workspace;

/// What each room may import of the others: `schemas <- deploy/runtime <- {collector, processor, queries}`.
const LAW: [(&str, &[&str]); 5] = [
    ("schemas", &[]),
    ("deploy/runtime", &["schemas"]),
    ("collector", &["schemas", "deploy/runtime"]),
    ("processor", &["schemas", "deploy/runtime"]),
    ("queries", &["schemas", "deploy/runtime"]),
];
/// Rooms that import any other.
const FREE: [&str; 3] = ["deploy/standalone", "tests", "benches"];
/// Crates that few places may name: the crate, and how the paths of those places begin.
const GUARDED: [(&str, &[&str]); 4] = [
    ("nvml-wrapper", &["collector/src/source/nvml.rs"]),
    ("rdkafka", &["deploy/runtime/", "deploy/standalone/src/broker.rs", "tests/", "benches/"]),
    ("datafusion", &["queries/", "tests/", "benches/"]),
    (
        "deltalake",
        &["deploy/runtime/src/lake.rs", "processor/src/archive/", "processor/src/replay/", "tests/", "benches/"],
    ),
];
/// Where nothing may depend on when or where it runs (law L1).
const PURE: [&str; 5] = [
    "processor/src/engine",
    "processor/src/detect",
    "processor/src/worker",
    "processor/src/replay",
    "collector/src/simulator",
];
/// The loops around the pure task: they wait for bytes.
const IMPURE: [&str; 3] =
    ["processor/src/detect/consumer.rs", "processor/src/detect/sink.rs", "processor/src/replay/topic.rs"];
/// Wall clocks, randomness without a seed, and maps whose order changes from run to run.
const CHANGING: [&str; 9] = [
    "SystemTime::now",
    "Instant::now",
    "rand::rng",
    "thread_rng",
    "from_os_rng",
    "OsRng",
    "new_v4",
    "HashMap",
    "HashSet",
];
/// Lines of a file, and of its code without tests.
const LONGEST: usize = 800;
const LONGEST_CODE: usize = 500;
/// Files whose code may be longer, up to `LONGEST`: (path, why).
const LONGER: [(&str, &str); 0] = [];
/// Files of `processor/src/detect/` that are no detector.
const NO_DETECTORS: [&str; 9] =
    ["config", "consumer", "detector", "group_task", "partials", "precedence", "sink", "task", "tests"];
/// Dependencies that are used without being named: (member, dependency). Say why.
const UNNAMED: [(&str, &str); 0] = [];
/// What a page may name although it is no file here: examples of the style page.
const EXAMPLES: [&str; 4] = ["foo.rs", "foo/", "foo/tests.rs", "mod.rs"];
/// Endings that make a word without a slash a file's name.
const ENDINGS: [&str; 8] = [".rs", ".toml", ".md", ".sql", ".tsv", ".avsc", ".xml", ".lock"];

/// Paths below the repository's root of all files that are, or are about to be, part of it; sorted.
pub(crate) fn files() -> Vec<String> {
    let root = workspace();
    let listed = Command::new("git")
        .args(["ls-files", "-z", "--cached", "--others", "--exclude-standard"])
        .current_dir(&root)
        .output()
        .ok()
        .filter(|output| output.status.success())
        .map(|output| String::from_utf8_lossy(&output.stdout).split_terminator('\0').map(str::to_owned).collect());
    let mut files: BTreeSet<String> = listed.unwrap_or_default();
    if files.is_empty() {
        walk(&root, "", &mut files);
    }
    // The index may name what was deleted a moment ago.
    files.into_iter().filter(|path| root.join(path).is_file()).collect()
}

/// The files of a checkout without git, such as an unpacked archive.
fn walk(folder: &Path, below: &str, files: &mut BTreeSet<String>) {
    for entry in fs::read_dir(folder).into_iter().flatten().flatten() {
        let name = entry.file_name().to_string_lossy().into_owned();
        if ["target", ".git", "gpufleet-lake"].contains(&name.as_str()) {
            continue;
        }
        let path = format!("{below}{name}");
        match entry.file_type() {
            Ok(kind) if kind.is_dir() => walk(&entry.path(), &format!("{path}/"), files),
            _ => drop(files.insert(path)),
        }
    }
}

fn read(path: &str) -> String {
    let bytes = fs::read(workspace().join(path)).unwrap_or_else(|error| panic!("cannot read {path}: {error}"));
    String::from_utf8_lossy(&bytes).into_owned()
}

fn ending_in(ending: &str) -> impl Iterator<Item = String> {
    files().into_iter().filter(move |path| path.ends_with(ending))
}

/// Fails with all of them at once.
fn none(found: &[String], law: &str) {
    assert!(found.is_empty(), "{law}:\n{}", found.join("\n"));
}

// --- Rust, as far as it is read here -----------------------------------------------------------------------------------

/// A Rust file with comments and the contents of strings blanked; lines stay where they are.
struct Source {
    path: String,
    text: String,
    /// Everything but comments and strings.
    code: String,
    /// `code` with test modules blanked; empty in a file of tests.
    own: String,
    /// Lines of the test modules.
    test_lines: usize,
}

impl Source {
    fn read(path: String) -> Source {
        let text = read(&path);
        let code = code_of(&text);
        if is_test(&path) {
            let test_lines = text.lines().count();
            return Source { path, text, code, own: String::new(), test_lines };
        }
        let (own, test_lines) = without_tests(&code);
        Source { path, text, code, own, test_lines }
    }

    fn all() -> impl Iterator<Item = Source> {
        ending_in(".rs").map(Source::read)
    }
}

fn is_test(path: &str) -> bool {
    path.starts_with("tests/") || path.contains("/tests/") || path.ends_with("/tests.rs")
}

/// Which of `words` a code names, with the lines.
fn named<'a>(path: &str, code: &str, words: &[&'a str]) -> Vec<(&'a str, String)> {
    let lines = code.lines().enumerate();
    lines
        .flat_map(|(index, line)| {
            let here = words.iter().filter(move |word| names(line, word));
            here.map(move |word| (*word, format!("{path}:{}: {word}", index + 1)))
        })
        .collect()
}

/// Whether `word` stands in the line, not as a part of a longer name.
fn names(line: &str, word: &str) -> bool {
    let part = |character: Option<char>| character.is_some_and(|c| c.is_alphanumeric() || c == '_');
    let (starts, ends) = (part(word.chars().next()), part(word.chars().next_back()));
    line.match_indices(word).any(|(at, _)| {
        let goes_on_before = starts && part(line[..at].chars().next_back());
        let goes_on_behind = ends && part(line[at + word.len()..].chars().next());
        !goes_on_before && !goes_on_behind
    })
}

/// Blanks comments, strings and characters.
fn code_of(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut code = String::with_capacity(text.len());
    let mut at = 0;
    while at < chars.len() {
        let end = skipped(&chars, at).unwrap_or(at);
        if end > at {
            code.extend(chars[at..end].iter().map(|c| if *c == '\n' { '\n' } else { ' ' }));
            at = end;
        } else {
            code.push(chars[at]);
            at += 1;
        }
    }
    code
}

/// Where what begins here and is no code ends.
fn skipped(chars: &[char], at: usize) -> Option<usize> {
    let is = |position: usize, wanted: char| chars.get(position) == Some(&wanted);
    let find = |from: usize, end: &dyn Fn(usize) -> bool| (from..chars.len()).find(|at| end(*at));
    let in_a_name = at > 0 && (chars[at - 1].is_alphanumeric() || chars[at - 1] == '_');
    match chars[at] {
        '/' if is(at + 1, '/') => Some(find(at, &|at| is(at, '\n')).unwrap_or(chars.len())),
        '/' if is(at + 1, '*') => {
            let (mut depth, mut position) = (0, at);
            while position < chars.len() {
                match (chars[position], chars.get(position + 1)) {
                    ('/', Some('*')) => (depth, position) = (depth + 1, position + 2),
                    ('*', Some('/')) => (depth, position) = (depth - 1, position + 2),
                    _ => position += 1,
                }
                if depth == 0 {
                    break;
                }
            }
            Some(position)
        }
        'r' if !in_a_name || (is(at - 1, 'b') || is(at - 1, 'c')) => {
            let hashes = chars[at + 1..].iter().take_while(|c| **c == '#').count();
            let open = at + 1 + hashes;
            let closed = |at: usize| is(at, '"') && (1..=hashes).all(|more| is(at + more, '#'));
            is(open, '"').then(|| find(open + 1, &closed).map_or(chars.len(), |at| at + 1 + hashes))
        }
        '"' => {
            let mut position = at + 1;
            while position < chars.len() && !is(position, '"') {
                position += if is(position, '\\') { 2 } else { 1 };
            }
            Some((position + 1).min(chars.len()))
        }
        // A character; else it is a lifetime.
        '\'' if is(at + 1, '\\') => Some(find(at + 3, &|at| is(at, '\'')).map_or(chars.len(), |at| at + 1)),
        '\'' if is(at + 2, '\'') => Some(at + 3),
        _ => None,
    }
}

/// Blanks what is compiled for tests only; counts its lines.
fn without_tests(code: &str) -> (String, usize) {
    const MARK: &str = "#[cfg(test)]";
    let (mut own, mut rest, mut lines) = (String::new(), code, 0);
    while let Some(at) = rest.find(MARK) {
        own += &rest[..at];
        rest = &rest[at..];
        let body = MARK.len() + rest[MARK.len()..].find(['{', ';']).unwrap_or(rest.len() - MARK.len());
        let mut depth = 0;
        let end = rest[body..].char_indices().find_map(|(offset, character)| {
            match character {
                '{' => depth += 1,
                '}' => depth -= 1,
                _ => {}
            }
            (depth == 0).then_some(body + offset + character.len_utf8())
        });
        let item = &rest[..end.unwrap_or(rest.len())];
        lines += item.lines().count();
        own.extend(item.chars().filter(|character| *character == '\n'));
        rest = &rest[item.len()..];
    }
    (own + rest, lines)
}

#[test]
fn comments_strings_and_test_modules_are_no_code() {
    let text = "let a = \"x \\\" todo!\"; // HashMap\nlet b = r#\"un\"wrap\"#; /* a /* b */ c */ let c = '\"';\nfn f<'a>() {}\n\
                #[cfg(test)]\nmod tests {\n    fn g() { h() }\n}\nfn k() {}\n";
    let code = code_of(text);
    assert_eq!(code.lines().count(), text.lines().count());
    for gone in ["todo", "HashMap", "wrap", "b */"] {
        assert!(!code.contains(gone), "{gone} in {code}");
    }
    assert!(code.contains("let c =") && code.contains("fn f<'a>() {}"), "{code}");
    let (own, lines) = without_tests(&code);
    assert!(!own.contains("fn g") && own.contains("fn k() {}") && lines == 4, "{lines} {own}");
    assert!(names("use rdkafka::x", "rdkafka") && !names("librdkafka", "rdkafka"));
    assert!(!names("use rand::rngs::X", "rand::rng") && names("x.unwrap();", ".unwrap()"));
}

#[test]
fn every_module_opens_by_saying_what_it_is_for() {
    let silent: Vec<_> = Source::all()
        .filter(|source| !is_test(&source.path) && !source.text.starts_with("//! "))
        .map(|source| source.path)
        .collect();
    none(&silent, "these begin without a //! header");
}

#[test]
fn no_rust_file_is_longer_than_a_reader_bears() {
    let long: Vec<_> = Source::all()
        .filter_map(|source| {
            let all = source.text.lines().count();
            let own = all - source.test_lines;
            let excused = LONGER.iter().any(|(path, _)| *path == source.path);
            (all > LONGEST || (own > LONGEST_CODE && !excused))
                .then(|| format!("{}: {all} lines, {own} without tests", source.path))
        })
        .collect();
    none(&long, "at most 800 lines, 500 of them no tests; split these");
}

#[test]
fn nothing_is_left_unfinished_or_unwraps() {
    let found: Vec<_> = Source::all()
        .flat_map(|source| {
            let mut found = named(&source.path, &source.code, &["todo!", "unimplemented!", "dbg!"]);
            found.extend(named(&source.path, &source.own, &[".unwrap()"]));
            found
        })
        .map(|(_, place)| place)
        .collect();
    none(&found, "finish these, and say with expect why it holds");
}

#[test]
fn engine_detectors_and_simulator_see_no_clock_no_chance_and_no_map_order() {
    let found: Vec<_> = Source::all()
        .filter(|source| PURE.iter().any(|room| source.path.starts_with(room)))
        .filter(|source| !IMPURE.contains(&source.path.as_str()))
        .flat_map(|source| named(&source.path, &source.own, &CHANGING))
        .map(|(_, place)| place)
        .collect();
    none(&found, "law L1: a replay must give the same bytes");
}

// --- Rooms and what they import ----------------------------------------------------------------------------------------

/// A member of the workspace.
struct Member {
    folder: String,
    dependencies: BTreeSet<String>,
}

fn members() -> Vec<Member> {
    let manifest = read("Cargo.toml");
    let list =
        manifest.split_once("members = [").and_then(|(_, rest)| rest.split_once(']')).expect("a list of members").0;
    let folders: Vec<_> = list.split('"').skip(1).step_by(2).map(str::to_owned).collect();
    assert!(folders.len() > FREE.len(), "members found: {folders:?}");
    folders
        .into_iter()
        .map(|folder| {
            let dependencies = dependencies(&read(&format!("{folder}/Cargo.toml")), "");
            Member { folder, dependencies }
        })
        .collect()
}

/// Names of the dependencies of a manifest, of all kinds.
fn dependencies(manifest: &str, before: &str) -> BTreeSet<String> {
    let (mut found, mut inside) = (BTreeSet::new(), false);
    for line in manifest.lines() {
        if let Some(section) = line.trim().strip_prefix('[') {
            let section = section.trim_end_matches(']').strip_prefix(before).unwrap_or_default();
            inside = section.ends_with("dependencies");
            found.extend(section.split_once("dependencies.").map(|(_, name)| name.to_owned()));
        } else if inside && line.starts_with(|first: char| first.is_ascii_alphabetic()) {
            let name = line.split(['.', '=', ' ']).next().unwrap_or_default();
            found.insert(name.to_owned());
        }
    }
    found
}

fn crate_of(folder: &str) -> String {
    format!("gpufleet-{}", folder.rsplit('/').next().unwrap_or_default())
}

/// The sources of a member, without those of members below it.
fn sources_of(folder: &str) -> impl Iterator<Item = Source> {
    let inside = format!("{folder}/");
    ending_in(".rs").filter(move |path| path.starts_with(&inside)).map(Source::read)
}

#[test]
fn rooms_import_only_what_the_law_allows() {
    let members = members();
    let mut found = Vec::new();
    for member in &members {
        let Some((_, allowed)) = LAW.iter().find(|(folder, _)| *folder == member.folder) else {
            assert!(FREE.contains(&member.folder.as_str()), "{} is no room of the import law", member.folder);
            continue;
        };
        let strangers: Vec<_> = members
            .iter()
            .filter(|other| other.folder != member.folder && !allowed.contains(&other.folder.as_str()))
            .map(|other| crate_of(&other.folder))
            .collect();
        let listed = strangers.iter().filter(|name| member.dependencies.contains(*name));
        found.extend(listed.map(|name| format!("{}/Cargo.toml: {name}", member.folder)));
        let words: Vec<_> = strangers.iter().map(|name| name.replace('-', "_")).collect();
        let words: Vec<_> = words.iter().map(String::as_str).collect();
        for source in sources_of(&member.folder) {
            found.extend(named(&source.path, &source.code, &words).into_iter().map(|(_, place)| place));
        }
    }
    none(
        &found,
        "import law: schemas <- deploy/runtime <- {collector, processor, queries}, and roles never each other",
    );
}

#[test]
fn guarded_crates_are_named_only_where_they_belong() {
    let mut found = Vec::new();
    for (name, places) in GUARDED {
        let word = name.replace('-', "_");
        for source in Source::all().filter(|source| !places.iter().any(|place| source.path.starts_with(place))) {
            found.extend(named(&source.path, &source.code, &[&word]).into_iter().map(|(_, place)| place));
        }
        for member in members().iter().filter(|member| member.dependencies.contains(name)) {
            if !places.iter().any(|place| place.starts_with(&format!("{}/", member.folder))) {
                found.push(format!("{}/Cargo.toml: {name}", member.folder));
            }
        }
    }
    none(&found, "these crates have one room each");
}

#[test]
fn every_dependency_is_used_and_has_its_line_in_the_record() {
    let record = read("docs/adr/0004-dependencies.md");
    let rows: String = record.lines().filter(|line| line.starts_with("| ")).collect();
    let mut found = Vec::new();
    let mut used = BTreeSet::new();
    for member in members() {
        let code: String = sources_of(&member.folder).map(|source| source.code).collect();
        let unused =
            member.dependencies.iter().filter(|name| !code.lines().any(|line| names(line, &name.replace('-', "_"))));
        let unused = unused.filter(|name| !UNNAMED.contains(&(member.folder.as_str(), name.as_str())));
        found.extend(unused.map(|name| format!("{}/Cargo.toml: {name} is used nowhere", member.folder)));
        used.extend(member.dependencies);
    }
    for name in dependencies(&read("Cargo.toml"), "workspace.") {
        if !used.contains(&name) {
            found.push(format!("Cargo.toml: no member takes {name}"));
        }
        if !name.starts_with("gpufleet-") && !names(&rows, &name) {
            found.push(format!("docs/adr/0004-dependencies.md: no line for {name}"));
        }
    }
    none(&found, "dependencies");
}

#[test]
fn running_and_testing_build_every_dependency_with_the_same_features() {
    let run = features(&["-p", "gpufleet-standalone", "-e", "normal,build"]);
    let build = features(&["--workspace", "-e", "normal,build"]);
    let test = features(&["--workspace", "-e", "normal,build,dev"]);
    let mut differ = Vec::new();
    for (name, with) in &run {
        for (other, what) in [(&build, "the programs"), (&test, "the tests")] {
            let others = other.get(name).filter(|others| *others != with);
            differ.extend(others.map(|others| format!("{name}: {with:?} for cargo run, {others:?} for {what}")));
        }
    }
    none(&differ, "these are compiled twice, and what stands on them: name the features in [workspace.dependencies]");
    assert!(run.len() > 100, "cargo tree lists only {} packages", run.len());
}

/// Each package of a build with the sets of features that it is built with: one for the host's tools may differ.
fn features(selection: &[&str]) -> BTreeMap<String, BTreeSet<String>> {
    let cargo = env::var_os("CARGO").unwrap_or_else(|| "cargo".into());
    let output = Command::new(cargo)
        .args(["tree", "--offline", "--locked", "--prefix", "none", "-f", "{p} {f}"])
        .args(selection)
        .current_dir(workspace())
        .output()
        .expect("cargo runs the tests, so it is here");
    assert!(output.status.success(), "cargo tree: {}", String::from_utf8_lossy(&output.stderr));
    let mut packages: BTreeMap<String, BTreeSet<String>> = BTreeMap::new();
    for line in String::from_utf8_lossy(&output.stdout).lines() {
        let mut words = line.split(' ').filter(|word| !word.is_empty() && !word.starts_with('('));
        if let (Some(name), Some(version)) = (words.next(), words.next()) {
            packages.entry(format!("{name} {version}")).or_default().insert(words.collect());
        }
    }
    packages
}

// --- The file list is the feature list ---------------------------------------------------------------------------------

#[test]
fn every_detector_has_its_file_and_its_runbook_and_nothing_else_has() {
    let thresholds = read("processor/detectors.toml");
    let sections = thresholds.lines().filter_map(|line| line.strip_prefix('[')?.strip_suffix(']'));
    let kinds: BTreeSet<_> = sections.filter(|section| *section != "engine").map(str::to_owned).collect();
    assert!(!kinds.is_empty(), "processor/detectors.toml names no detector");
    let stems = |folder: &str, ending: &str| -> BTreeSet<String> {
        let names =
            files().into_iter().filter_map(|path| Some(path.strip_prefix(folder)?.strip_suffix(ending)?.to_owned()));
        names.filter(|name| !name.contains('/') && !NO_DETECTORS.contains(&name.as_str())).collect()
    };
    assert_eq!(stems("processor/src/detect/", ".rs"), kinds, "detectors, against processor/detectors.toml");
    assert_eq!(stems("docs/operating/runbooks/", ".md"), kinds, "runbooks, against processor/detectors.toml");
}

#[test]
fn every_question_is_registered_under_its_name() {
    let registry = read("queries/src/question.rs").split_whitespace().collect::<Vec<_>>().join(" ");
    let files = files()
        .into_iter()
        .filter_map(|path| Some(path.strip_prefix("queries/sql/")?.strip_suffix(".sql")?.to_owned()));
    let questions: Vec<_> = files.filter(|name| !name.contains('/')).collect();
    assert!(!questions.is_empty(), "there are no questions in queries/sql");
    let entry = |name: &str| format!("name: \"{name}\", sql: include_str!(\"../sql/{name}.sql\")");
    let missing: Vec<_> = questions.into_iter().filter(|name| !registry.contains(&entry(name))).collect();
    none(&missing, "queries/src/question.rs does not list these under the names of their files");
}

// --- Pages -------------------------------------------------------------------------------------------------------------

#[test]
fn pages_name_only_what_is_there() {
    let files = files();
    let mut found = Vec::new();
    for page in files.iter().filter(|path| path.ends_with(".md")) {
        for (line, text) in prose(&read(page)) {
            let paths = text.split('`').skip(1).step_by(2).filter(|word| !EXAMPLES.contains(word));
            let gone = paths.flat_map(braces).filter(|path| is_path(path, &files) && !is_there(path, page, &files));
            found.extend(gone.map(|path| format!("{page}:{line}: `{path}`")));
            let links = text.split("](").skip(1).filter_map(|rest| rest.split(')').next());
            let gone = links.filter(|link| !link.contains("://") && !link.starts_with('#') && !links_to(link, page));
            found.extend(gone.map(|link| format!("{page}:{line}: ]({link})")));
        }
    }
    none(&found, "these are not in the repository");
}

#[test]
fn pages_hold_no_figure_that_is_still_to_be_measured() {
    let mark = concat!("TB", "D");
    let found: Vec<_> =
        ending_in(".md").flat_map(|page| named(&page, &read(&page), &[mark])).map(|(_, place)| place).collect();
    none(&found, "measure, or leave the sentence out");
}

/// The lines of a page outside fenced blocks, numbered.
fn prose(page: &str) -> Vec<(usize, String)> {
    let mut fenced = false;
    let lines = page.lines().enumerate().filter(|(_, line)| {
        let fence = line.starts_with("```");
        fenced ^= fence;
        !fenced && !fence
    });
    lines.map(|(index, line)| (index + 1, line.to_owned())).collect()
}

/// `a/{b,c}` as `a/b` and `a/c`; `<x>`, which stands for anything, as `*`.
fn braces(word: &str) -> Vec<String> {
    let mut word = word.to_owned();
    while let Some((before, rest)) = word.split_once('<') {
        let Some((_, after)) = rest.split_once('>') else { break };
        word = format!("{before}*{after}");
    }
    match word.split_once('{').and_then(|(before, rest)| Some((before, rest.split_once('}')?))) {
        Some((before, (names, after))) => names.split(',').map(|name| format!("{before}{name}{after}")).collect(),
        None => vec![word],
    }
}

/// Whether a word in backquotes is meant as a path of this repository.
fn is_path(word: &str, files: &[String]) -> bool {
    let plain = word.chars().all(|c| c.is_ascii_alphanumeric() || "_-./*".contains(c));
    let room = word.split('/').next().unwrap_or_default();
    let in_a_room = word.contains('/') && files.iter().any(|file| file.starts_with(&format!("{room}/")));
    plain
        && word.starts_with(|first: char| first.is_ascii_alphanumeric() || first == '.')
        && (in_a_room || word.ends_with('/') || ENDINGS.iter().any(|ending| word.ends_with(ending) && word != *ending))
}

/// Whether a path stands below the root or the page, or is the end of a file's or folder's path, as pages shorten them.
fn is_there(path: &str, page: &str, files: &[String]) -> bool {
    let path = path.trim_start_matches("./").trim_end_matches('/');
    let room = path.split('/').next().unwrap_or_default();
    let whole = files.iter().any(|file| file.starts_with(&format!("{room}/")));
    let below = page.rsplit_once('/').map_or(String::new(), |(folder, _)| format!("{folder}/{path}"));
    files.iter().any(|file| {
        let mut ends = file.match_indices('/').map(|(at, _)| at).chain([file.len()]);
        ends.any(|end| {
            let known = &file[..end];
            let tail = known.len().checked_sub(path.len()).filter(|_| !whole && !path.contains('*'));
            let shortened =
                tail.is_some_and(|at| known.ends_with(path) && (at == 0 || known.as_bytes()[at - 1] == b'/'));
            matches(path, known) || matches(&below, known) || shortened
        })
    })
}

/// `*` stands for anything but a slash.
fn matches(pattern: &str, path: &str) -> bool {
    match pattern.split_once('*') {
        None => pattern == path,
        Some((before, after)) => path.strip_prefix(before).is_some_and(|rest| {
            let reach = rest.find('/').unwrap_or(rest.len());
            (0..=reach).filter(|at| rest.is_char_boundary(*at)).any(|at| matches(after, &rest[at..]))
        }),
    }
}

fn links_to(link: &str, page: &str) -> bool {
    let link = link.split('#').next().unwrap_or_default();
    let folder = Path::new(page).parent().unwrap_or(Path::new(""));
    let mut path = PathBuf::new();
    for part in folder.join(link).components() {
        match part {
            Component::ParentDir if !path.pop() => return false,
            Component::Normal(name) => path.push(name),
            _ => {}
        }
    }
    workspace().join(path).exists()
}

#[test]
fn paths_on_pages_are_told_from_other_words() {
    let files = ["schemas/src/wire.rs", "schemas/src/wire/decode.rs", "schemas/avro/tick.v1.avsc", "docs/a.md"];
    let files = files.map(str::to_owned);
    for (word, there) in [
        ("schemas/src/wire.rs", true),
        ("wire.rs", true),
        ("wire/", true),
        ("wire/decode.rs", true),
        ("schemas/avro/*.avsc", true),
        ("schemas/wire.rs", false),
        ("ire.rs", false),
        ("schemas/src/*.sql", false),
        ("gone/", false),
    ] {
        assert!(is_path(word, &files), "{word}");
        assert_eq!(is_there(word, "docs/a.md", &files), there, "{word}");
    }
    for word in ["/dev/kmsg", "~/.cache/x", "gpu.telemetry", "a b.rs", "and/or"] {
        assert!(!is_path(word, &files), "{word}");
    }
    assert_eq!(braces("a/{b,c}.rs"), ["a/b.rs", "a/c.rs"]);
    assert_eq!(braces("avro/<record>.v<N>.avsc"), ["avro/*.v*.avsc"]);
}

#[test]
fn no_file_names_a_place_that_only_some_workplace_has() {
    // In pieces, so that this file does not name them.
    let places = [
        concat!("/wo", "rk/"),
        concat!("/ro", "ot/"),
        concat!("/tmp/stu", "dio"),
        concat!("fa", "rm"),
        concat!("crates", ".io"),
        concat!("py", "pi.org"),
        concat!("python", "hosted.org"),
        concat!("npm", "js.org"),
        concat!("repo", ".maven"),
        concat!("repo1", ".maven"),
        concat!("proxy.", "golang.org"),
        concat!("arti", "factory"),
    ];
    // The lock file names the public registry, as cargo writes it.
    let texts = files().into_iter().filter(|path| path != "Cargo.lock");
    let found: Vec<_> = texts
        .filter_map(|path| Some((String::from_utf8(fs::read(workspace().join(&path)).ok()?).ok()?, path)))
        .flat_map(|(text, path)| named(&path, &text.to_ascii_lowercase(), &places))
        .map(|(_, place)| place)
        .collect();
    none(&found, "paths, hosts and words of a workplace do not belong here");
}
