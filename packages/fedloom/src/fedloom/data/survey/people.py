"""Detection of columns that contain names of people, contact details or text about people, by column name and cells."""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Mapping

from fedloom.data.tables import is_number, parse_number

MIN_PATTERN_CELLS = 10
"""Minimum number of cells for comparing a pattern. With fewer cells, most cells could be distinct by chance."""
MIN_PATTERN_SHARE = 0.8
"""Minimum fraction of a column's cells that must match a pattern. It is less than 1, because real columns also contain
remarks and typing errors."""
MIN_DISTINCT_SHARE = 0.5
"""Text cannot be a category if at least this fraction of its cells is distinct, because a level then has only two rows
on average."""
MIN_REPEATED_CELLS = 20
"""Minimum number of distinct cells for checking a column in which cells repeat, as for patients with several visits."""
MIN_NAMES = 3
"""Minimum number of different given names in a column of names. If there are only two, they may be the names of two
groups."""
MIN_GIVEN_NAME_SHARE = 0.3
"""Minimum fraction of a column's distinct cells that must contain a given name. The value was chosen so that columns of
names reach it even though rare names are not listed, whereas columns of places and products contain few given names."""
MAX_PATTERN_CELLS = 2000
"""Maximum number of distinct cells that are matched against a pattern. For 2,000 cells, a fraction is known to within
2.2 percentage points (with 95 % confidence)."""


def words(text: str) -> frozenset[str]:
    """Return the set of words in a text."""
    return frozenset(text.split())


NAME_COLUMNS = words(
    "firstname forename givenname surname lastname familyname maidenname middlename fullname patientname personname "
    "fname lname patname ptname nextofkin contactperson "
    "vorname nachname familienname geburtsname patientenname zuname prenom nomdefamille nombre nombres apellido "
    "apellidos cognome sobrenome apelido voornaam achternaam imie nazwisko fornamn efternamn fornavn etternavn "
    "efternavn etunimi sukunimi soyad soyadi имя фамилия отчество фио 姓名 氏名 이름 الاسم שם"
)
"""Names of columns with names of people, in lower case and without spaces and accents."""
PERSON_WORDS = (
    "patient(en)?|pat|pt|subject|subj|person|individual|participant|respondent|case|proband(en)?|pseudonym|member|family|"
    "household|couple|litter|twin|user|animal|pig|paciente|paziente|pacjent|pasient"
)
"""Alternatives of a pattern: words for people and similar units whose rows belong together."""
NUMBERED_WORDS = (
    "customer|client|employee|student|account|policy|record|fall|versicherten|kunden|mitarbeiter|mitglieds|matrikel"
)
"""Alternatives of a pattern: words that mean a person or case next to a word for a number or identifier."""
RECORD_WORDS = "stay|icustay|hadm|visit|admission|encounter|sample|specimen|accession|barcode|child|infant|donor"
"""Alternatives of a pattern: words that mean an identifier only next to ``id``. A visit number may be a count."""
PERSON_WORD_PATTERN = re.compile(
    rf"u?({PERSON_WORDS})((id|nr|no|num|number|nummer|key)s?)?|pid|mrn|uid|ids?|seqn|(icu)?stayid|hadmid"
)
"""Pattern of a word that means a person or the identifier of a person. Plurals, as in ``cases``, are counts."""
ID_WORD_PATTERN = re.compile(
    rf"ids?|uuid|guid|mrn|pid|uid|seqn|u?({PERSON_WORDS}|{NUMBERED_WORDS}|{RECORD_WORDS})(id|key)s?|"
    rf"({NUMBERED_WORDS})(nr|no|number|nummer)"
)
"""Pattern of a word that means an identifier wherever it occurs in a name."""
NUMBER_WORDS = words("no nr nbr num number nummer numero identifier barcode key")
"""Words at the end of a name that mean an identifier if the preceding word means a person or record."""
NEUTRAL_WORDS = NUMBER_WORDS | words("id ids name names code codes of the study index label fake hash")
"""Words next to a word for a person or site that leave its meaning unchanged.

Any other word, as in hospital_expire_flag, may change the meaning.
"""
POSSIBLE_NAME_WORDS = words("name nom nome naam ad namn navn nimi patient person doctor physician nurse arzt medecin")
"""Names of columns that may contain names of people, depending on their cells."""
CONTACT_WORDS = {
    "phone numbers": "phone phonenumber telephone telefon telefonnummer tlf telefono telefone telefoon tel mobile "
    "mobil mobilenumber msisdn imei cellphone handy handynummer fax whatsapp puhelin contact contactnumber contactno "
    "contactnr kontakt kontaktnummer rufnummer contacto contatto celular cellulare телефон 电话 電話",
    "email addresses": "email emailaddress mail mailaddress correo courriel почта 邮箱",
    "addresses": "address streetaddress homeaddress street strasse straße anschrift adresse adres direccion domicilio "
    "indirizzo endereco calle rue adress adresa адрес 地址 住所",
    "postal codes": "postcode postalcode zip zipcode plz postleitzahl codepostal codigopostal codicepostale postnummer "
    "postinumero індекс 邮编 郵便番号",
    "insurance or identity numbers": "ssn socialsecurity socialsecuritynumber socialsecurityno sin nino nric cnic cnp "
    "egn oib jmbg insurancenumber insuranceid insuranceno healthcardnumber medicarenumber medicareid "
    "medicalrecordnumber nhsnumber nhsno nhs chinumber nationalid versicherungsnummer versichertennummer "
    "versichertennr versnr krankenversicherungsnummer kvnr nir numerosecuritesociale cpf curp dni codicefiscale bsn "
    "pesel personnummer henkilotunnus fodselsnummer sozialversicherungsnummer svnummer rodnecislo tckimlik mynumber "
    "ahvnummer ahvnr aadhaar iban bic kontonummer accountnumber accountno creditcard creditcardnumber passport "
    "passportnumber passportno reisepass licenseplate licenceplate kennzeichen driverslicense ipaddress снилс 身份证",
}
"""Words in the names of columns that contain contact details or identifiers of people, keyed by kind."""
LAST_CONTACT_WORDS = words("contact kontakt contacto contatto sin nir zip")
"""Words in `CONTACT_WORDS` that have a different meaning unless they are the last word in a name."""
MEASURE_WORDS = words(
    "minutes mins minuten seconds secs sekunden hours usage kb mb gb bytes calls count counts duration cost costs "
    "charge charges bill billing balance amount total sum spend spent price fee fees pages minutos segundos dauer"
)
"""Words in the name of a column of numbers that mean a measurement next to a word for contact details, as in
``phone_minutes``."""
MIN_CONTACT_NUMBER = 10**6
"""Smallest maximum of integers that may be phone or insurance numbers. Smaller integers are measurements or counts."""
IDENTITY_KINDS = frozenset({"insurance or identity numbers", "phone or identity numbers"})
"""Results of `personal_information_kind` for numbers that identify a person, so that rows with equal numbers belong
together."""
WEB_PATTERN = re.compile(r"(https?://|www\.)\S+|(\d{1,3}\.){3}\d{1,3}", re.IGNORECASE)
EMAIL_PATTERN = re.compile(r"([^@]*<)?[^@\s]+@[^@\s]+\.[^@\s]+>?")
GIVEN_NAMES = words(
    "james john robert michael william david richard joseph thomas charles christopher daniel matthew anthony mark "
    "donald steven paul andrew kenneth george kevin brian edward ronald timothy jason jeffrey ryan jacob gary nicholas "
    "eric jonathan stephen larry justin scott brandon benjamin samuel gregory patrick peter henry adam max oliver jack "
    "harry mary patricia jennifer linda elizabeth barbara susan jessica sarah karen lisa nancy betty sandra margaret "
    "ashley kimberly emily donna michelle carol amanda melissa deborah stephanie rebecca laura helen sharon cynthia "
    "kathleen amy angela anna ruth brenda pamela nicole katherine samantha christine emma catherine olivia alice jane "
    "hans klaus wolfgang jürgen günter uwe stefan andreas karl fritz otto heinz jens jan lars sven erik nils ole "
    "ursula monika petra sabine renate ingrid heike gabriele birgit greta lena jean pierre jacques philippe michel "
    "alain marie françoise monique isabelle sylvie nathalie jose juan carlos luis antonio manuel francisco pedro jorge "
    "maria carmen ana isabel lucia elena giuseppe giovanni marco francesco luca giulia paolo joao piotr tomasz "
    "katarzyna agnieszka ivan sergei dmitri olga natalia иван сергей александр пётр дмитрий анна мария елена ольга "
    "mohammed mohamed muhammad ahmed ali fatima aisha hassan omar محمد أحمد علي فاطمة حسن priya rahul amit wei li ming "
    "hiroshi yuki kenji mehmet ayşe mustafa anke bernd heiko holger torsten thorsten silke ralf detlef ines katrin "
    "kerstin sigrid gudrun jörg dirk anja tanja lukas leon finn emil mia lina lea jonas felix julia lisa sophie marc "
    "luc camille chloe hugo louis sofia aurora alessandro chiara matteo davide elif emre zeynep murat burak cem selin "
    "hülya fatma orhan stanisław małgorzata krystyna wojciech jerzy zbigniew magdalena jakub petr pavel jana tomas "
    "lucie ondrej zoltan laszlo eva katalin bogdan mihai andrei ioana nikos giorgos eleni dimitris γιώργος μαρία νίκος "
    "ελένη δημήτρης yusuf ibrahim khadija mariam khalid layla يوسف مريم خالد ليلى david moshe sarah rachel yosef דוד "
    "שרה משה רחל יוסף anil sunil sunita deepak pooja sanjay lakshmi thabo sipho lerato nomsa amara kwame chidi ngozi "
    "adebayo jorge pablo marta javier rafael beatriz joana miguel tiago mateus freja ingrid astrid mikael anders björn "
    "johan emma noah liam mason ethan"
)
"""Common given names, in lower case. A given name must occur only in a fraction of a column's cells
(`MIN_GIVEN_NAME_SHARE`)."""
TITLE_PATTERN = re.compile(
    r"(?i:dra?|prof|mrs?|ms|miss|herr|frau|mme|mlle|sra?|srta|dott(\.?ssa)?|pani?|hr|fr)\b\.?,?\s*"
    r"(?i:med\.?|h\.?\s?c\.?|dr\.?)?\s*[^\W\d_a-z][^\d]*|[^\W\d_a-z][^\d,]*,\s*(M\.D|R\.N|D\.O|Ph\.?D|N\.P)\.?"
)
"""Pattern of a person's name with a title."""
DEGREE_PATTERN = re.compile(r"[^\W\d_a-z][^\d,]*,\s*(MD|RN|DO|NP)\.?")
"""Pattern of a person's name followed by a degree that may also be a US state, as in ``Baltimore, MD``."""
LONE_NAME_COLUMNS = words(
    "first last given family nom 氏 名 姓 mother father parent spouse partner guardian doctor physician nurse surgeon "
    "consultant attending referrer prescriber therapist midwife gp arzt hausarzt zuweiser chirurg medico medecin "
    "infirmier enfermera traitant mutter vater врач 医生 医師"
)
"""Last words in the names of columns that contain people's names, if every cell consists of capitalized words."""
UNSURE_KIND = "names of people, or other names"
"""Result of `personal_information_kind` for texts that may also be names of other things, such as drugs."""
LONE_NAME_PATTERN = re.compile(r"([^\W\d_a-z]([^\W\d_]|[.'\u2019\-])+[ ,]*){1,4}")
STREET_WORD_PATTERN = re.compile(
    r"(stra(ß|ss)e|str\.|weg|platz|gasse|allee|ring|laan|straat|gatan)\b|\b(street|st|road|rd|avenue|ave|lane|drive|way|"
    r"rue|via|calle|ul|ulica|boulevard|blvd|piazza|плошадь|улица|ул)\b",
    re.IGNORECASE,
)
"""Pattern of words that occur in street addresses."""
FREE_TEXT_COLUMNS = words(
    "note notes comment comments remark remarks freetext bemerkung bemerkungen kommentar notiz notizen anmerkung "
    "anamnese freitext remarque remarques commentaire observaciones comentario comentarios osservazioni uwagi opmerking"
)
"""Names of columns that contain free text, in lower case."""
INITIALS_COLUMNS = words("initial initials initialen initiales iniciales iniziali kuerzel kürzel monogram")
INITIALS_PATTERN = re.compile(r"([^\W\d_]\.?[ -]?){1,4}")
IDENTITY_PATTERN = re.compile(
    r"\d{3}-\d{2}-\d{4}"  # a social security number
    r"|\d{3} \d{3} \d{4}|\d{4} \d{4} \d{4}|\d{3}\.\d{3}\.\d{3}-\d{2}|756\.\d{4}\.\d{4}\.\d{2}"
    r"|[A-Z]{2}\d{2}( ?[A-Z\d]{4}){3,7}( ?[A-Z\d]{1,3})?"  # an account
    r"|\+\d[\d ()/.\-]{7,}\d|\(\d{2,5}\) ?\d[\d -]{4,}\d"  # a phone
    r"|\d{6}[-+A]\d{3,4}[A-Z]?|[A-Z]{2} ?\d{6} ?[A-D]|[A-Z]{6}\d{2}[A-Z]\d{2}[A-Z]\d{3}[A-Z]"
)
"""Pattern of identity, account and phone numbers in a format that measurements do not have."""
PHONE_PATTERN = re.compile(r"(\+|00?)?\(?\d[\d ()/.\-]{5,}\d")
PHONE_SIGN_PATTERN = re.compile(r"^[+0(]|[ ()/\-]")
"""Pattern of punctuation that distinguishes phone or insurance numbers from measurements."""
MIN_PHONE_DIGITS = 7
"""Minimum number of digits in a phone number. Years such as 1889-90 and dates such as 10/22-25 have fewer digits and
therefore do not match."""
DECIMAL_PATTERN = re.compile(r"[-+]?\d*\.\d+(e[-+]?\d+)?", re.IGNORECASE)
CALENDAR_DAY_PATTERN = re.compile(r"\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}([ T].*)?")
FULL_NAME_PATTERN = re.compile(r"[^\W\d_a-z]([^\W\d_]|[.'\u2019\-])*(,?\s[^\W\d_]([^\W\d_]|[.'\u2019\-])*){1,4}")
"""Pattern of a person's full name: at least two words of letters, and the first word is capitalized."""
STREET_PATTERN = re.compile(r"(\d+\w?,?\s+[^\W\d_]{3}.*|[^\W\d_].*\s\d+\w?(,.*)?)")
"""Pattern that matches a street and a number, in either order."""
MIN_WORD_SHARE = 0.2
"""Minimum fraction of texts that are distinct without their digits if texts with numbers may be addresses."""
MIN_SENTENCE_WORDS = 4
"""A cell with at least this many words counts as a sentence and not as the name of a level."""


def plain_name(name: str) -> str:
    """Return the name of a column in lower case, without accents, spaces and punctuation.

    >>> plain_name("First_Name"), plain_name("Prénom"), plain_name("E-Mail")
    ('firstname', 'prenom', 'email')
    """
    letters = unicodedata.normalize("NFKD", name.casefold())
    return "".join(c for c in letters if c.isalnum())


def personal_information_kind(name: str, cells: Mapping[str, int], rows: int) -> str:
    """Return the kind of personal information in a column, as part of a sentence, or "" if it contains none.

    Args:
        name: name of the column.
        cells: number of rows for each distinct cell that is not missing.
        rows: number of rows whose cell is not missing.
    """
    texts = [_strip_combining_marks(cell.strip()) for cell, _ in zip(cells, range(MAX_PATTERN_CELLS), strict=False)]
    if not texts:
        return ""
    plain, parts, ends = plain_name(name), name_words(name), _last_words(name)
    different, text = len(cells) / rows, sum(not is_number(t) for t in texts) >= MIN_PATTERN_SHARE * len(texts)
    if text and (any(plain.endswith(end) for end in NAME_COLUMNS if len(end) > 3 or not end.isascii())
                 or parts & NAME_COLUMNS):  # fmt: skip
        return "names of people" if len(cells) > 2 else ""
    if rows < MIN_PATTERN_CELLS:
        return ""
    if _matching_share(EMAIL_PATTERN, texts) >= MIN_PATTERN_SHARE:
        return "email addresses"
    lone = bool(ends & LONE_NAME_COLUMNS) or plain in ("patient", "person")
    few = lone or plain in POSSIBLE_NAME_WORDS
    if len(texts) >= MIN_NAMES and _matching_share(TITLE_PATTERN, texts) >= MIN_PATTERN_SHARE:
        return "names of people"
    if text and len(texts) >= (MIN_NAMES if few else MIN_PATTERN_CELLS) and (kind := _find_names(texts, lone)):
        return kind
    mostly = different >= MIN_DISTINCT_SHARE
    many = mostly or len(cells) >= (MIN_PATTERN_CELLS if lone else MIN_REPEATED_CELLS)
    measured = not parts.isdisjoint(MEASURE_WORDS) and all(map(is_number, texts))
    for what, listed in () if measured else CONTACT_WORDS.items():
        meant = ends if what == "postal codes" and not text else ends | (parts - LAST_CONTACT_WORDS)
        if many and meant & {*listed.split()} and _matches_suggestion(what, texts, text):
            return what
    if many and text:
        if _matching_share(WEB_PATTERN, texts) >= MIN_PATTERN_SHARE:
            return "addresses of the web"
        if _matching_share(IDENTITY_PATTERN, texts) >= MIN_PATTERN_SHARE:
            return "phone or identity numbers"
        if lone and _matching_share(LONE_NAME_PATTERN, texts) >= MIN_PATTERN_SHARE:
            return UNSURE_KIND
        if sum(bool(STREET_PATTERN.fullmatch(t) and STREET_WORD_PATTERN.search(t)) for t in texts) >= (
            MIN_PATTERN_SHARE * len(texts)
        ):
            return "addresses"
        if parts & INITIALS_COLUMNS and _matching_share(INITIALS_PATTERN, texts) >= MIN_PATTERN_SHARE:
            return "initials of people"
        long = sum(len(t.split()) >= 2 * MIN_SENTENCE_WORDS for t in texts) >= MIN_DISTINCT_SHARE * len(texts)
        if long or (parts & FREE_TEXT_COLUMNS and len(cells) >= MIN_REPEATED_CELLS):
            return "free text"
    if not mostly or all(map(is_number, texts)):
        return ""
    if sum(bool(PHONE_PATTERN.fullmatch(t) and PHONE_SIGN_PATTERN.search(t) and not DECIMAL_PATTERN.fullmatch(t) and
        not CALENDAR_DAY_PATTERN.fullmatch(t) and sum(map(str.isdigit, t)) >= MIN_PHONE_DIGITS)
           for t in texts) >= MIN_PATTERN_SHARE * len(texts):  # fmt: skip
        return "phone or insurance numbers"
    if (
        text
        and parts & POSSIBLE_NAME_WORDS
        and sum(any(map(str.isdigit, t)) for t in texts) < MIN_DISTINCT_SHARE * len(texts)
    ):
        return "names of people" if few else UNSURE_KIND
    if text and _matching_share(FULL_NAME_PATTERN, texts) >= MIN_PATTERN_SHARE:
        return UNSURE_KIND
    if text and _matching_share(STREET_PATTERN, texts) >= MIN_PATTERN_SHARE and _differ_without_digits(texts):
        return "addresses or free text"
    return (
        "free text"
        if text and sum(len(t.split()) >= MIN_SENTENCE_WORDS for t in texts) >= MIN_DISTINCT_SHARE * len(texts)
        else ""
    )


def name_words(name: str) -> frozenset[str]:
    """Return the words in the name of a column, and two or three joined neighbors, each as in `plain_name`.

    >>> sorted(name_words("patientLastName2"))
    ['last', 'lastname', 'name', 'patient', 'patientlast', 'patientlastname']
    """
    parts = split_name(name)
    return frozenset("".join(parts[k:end]) for k in range(len(parts)) for end in range(k + 1, k + 4)[: len(parts) - k])


def names_subject(name: str) -> bool:
    """Return True if the name of a column means an identifier of people, stays or similar units.

    >>> [names_subject(n) for n in ("patient", "CaseNumber", "policy_no", "userid", "patient_nbr")]
    [True, True, True, True, True]
    >>> [names_subject(n) for n in ("uric_acid", "case_load", "cases", "household_income", "stay", "visit", "PT")]
    [False, False, False, False, False, False, False]
    """
    parts = split_name(name)
    numbered = len(parts) > 1 and parts[-1] in NUMBER_WORDS
    return (
        any(map(ID_WORD_PATTERN.fullmatch, parts))
        or names_person(name)
        or parts == ["key"]
        or (numbered and bool(re.fullmatch(f"{PERSON_WORDS}|{NUMBERED_WORDS}", parts[-2])))
    )


def names_person(name: str) -> bool:
    """Return True if a name can only mean a number that identifies a person, unlike ``stays_in_week_nights``."""
    parts, neutral = split_name(name), NEUTRAL_WORDS | {"stay", "hadm", "icustay"}
    return (
        any(map(PERSON_WORD_PATTERN.fullmatch, parts))
        and all(p in neutral or PERSON_WORD_PATTERN.fullmatch(p) for p in parts)
        and parts != ["pt"]  # PT alone means prothrombin time
    )


def split_name(name: str) -> list[str]:
    """Return the words in a name such as ``hospital_id`` or ``hospitalId``, each as in `plain_name`."""
    return [plain_name(word) for word in re.split(r"[\W\d_]+", re.sub(r"(?<=[a-z])(?=[A-Z])", " ", name)) if word]


def _last_words(name: str) -> frozenset[str]:
    """Return the last word in the name of a column, and up to three joined last words, without a final "name"."""
    parts = split_name(name)
    ends = [parts, parts[:-1]] if parts and parts[-1] in POSSIBLE_NAME_WORDS else [parts]
    return frozenset("".join(end[-k:]) for end in ends for k in (1, 2, 3) if end)


def _find_names(texts: list[str], lone: bool) -> str:
    """Return "names of people" if cells are names with a title or enough contain a given name, or "" otherwise.

    An academic degree that may also be a US state is considered a title only next to a given name or in a column that
    names people (`lone`).
    """
    titled = sum(
        bool(TITLE_PATTERN.fullmatch(t))
        or bool(DEGREE_PATTERN.fullmatch(t) and (lone or {*re.findall(r"[^\W\d_]+", t.casefold())} & GIVEN_NAMES))
        for t in texts
    )
    if titled >= MIN_PATTERN_SHARE * len(texts):
        return "names of people"
    short = [{*re.findall(r"[^\W\d_]+", t.casefold())} for t in texts if len(t.split()) <= MIN_SENTENCE_WORDS]
    named = sum(bool(each & GIVEN_NAMES) for each in short)
    return "names of people" if named >= max(MIN_GIVEN_NAME_SHARE * len(texts), MIN_NAMES) else ""


def _strip_combining_marks(text: str) -> str:
    """Return a text without the combining marks that follow letters, because patterns of letters do not match them."""
    return "".join(c for c in unicodedata.normalize("NFKC", text) if not unicodedata.category(c).startswith("M"))


def _matching_share(pattern: re.Pattern[str], texts: list[str]) -> float:
    return sum(pattern.fullmatch(text) is not None for text in texts) / len(texts)


def _differ_without_digits(texts: list[str]) -> bool:
    """Return True if texts still differ after their digits have been removed, as street addresses do.

    Texts such as ``12 months`` and ``13 months`` do not match.
    """
    words = {"".join(c for c in t if not c.isdigit()) for t in texts}
    return len(words) >= MIN_WORD_SHARE * len(texts)


def _matches_suggestion(what: str, texts: list[str], text: bool) -> bool:
    """Return True if the cells may contain what the column's name suggests, and not just yes and no, or counts."""
    if what == "addresses":
        return text
    if what == "postal codes":
        return sum(3 <= sum(c.isdigit() for c in t) <= 9 and len(t) <= 10 for t in texts) >= MIN_PATTERN_SHARE * len(
            texts
        )
    if what == "email addresses":
        return _matching_share(re.compile(r".*@.*"), texts) >= MIN_DISTINCT_SHARE
    if max((parse_number(t) or 0 for t in texts), default=0) < MIN_CONTACT_NUMBER and all(map(is_number, texts)):
        return False
    return sum(
        sum(c.isdigit() for c in t) >= 6 and DECIMAL_PATTERN.fullmatch(t) is None for t in texts
    ) >= MIN_PATTERN_SHARE * len(texts)
